"""Which step has the settings of one of Kornia's members?

Members are read through their public attributes, ``flags`` and the samplers of their
parameter generators; Kornia itself is not imported here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from gpuprefetch.augment.steps import (
    Affine,
    Border,
    CenterCrop,
    Crop,
    Flip,
    Interpolation,
    Resize,
    ResizedCrop,
    Rotation,
    Step,
)
from gpuprefetch.augment.values import Blur, Erase, Grayscale, Jitter, Pointwise

__all__ = ["READERS", "Unfusable"]


class Unfusable(Exception):
    """Raised by a reader; the message is the reason."""


# Settings shared by several classes #


def _flags(module: nn.Module) -> dict[str, Any]:
    return cast("dict[str, Any]", cast(Any, module).flags)


def _probability(module: nn.Module) -> float:
    """Per sample. Kornia has one for the whole batch too; both at once do not fuse."""
    p, p_batch = float(cast(Any, module).p), float(cast(Any, module).p_batch)
    if p_batch not in (0.0, 1.0):
        raise Unfusable(f"p_batch={p_batch:g} has no fused step")
    return p * p_batch


def _same(module: nn.Module) -> bool:
    return bool(cast(Any, module).same_on_batch)


def _require_always(module: nn.Module) -> None:
    p = float(cast(Any, module).p_batch)
    if p != 1.0:
        raise Unfusable(f"with p={p:g} the output's size depends on the draw")


def _resample(module: nn.Module) -> str:
    return str(_flags(module)["resample"].name).lower()


def _interpolation(module: nn.Module, nearest: Interpolation) -> Interpolation:
    resample = _resample(module)
    if resample == "bilinear":
        return "bilinear"
    if resample == "nearest":
        return nearest
    raise Unfusable(f"resample={resample!r} has no fused step")


def _range(distribution: Any) -> tuple[float, float]:
    return float(distribution.low), float(distribution.high)


def _floats(values: Any) -> tuple[float, ...]:
    return tuple(float(value) for value in torch.as_tensor(values).flatten().tolist())


def _pair(size: Any) -> tuple[int, int]:
    height, width = size
    return int(height), int(width)


# One reader per class #


def _require_whole_pixels(module: nn.Module) -> None:
    """A crop cuts between pixels; only bicubic resampling changes them all the same."""
    _require_always(module)
    if _resample(module) == "bicubic" and _flags(module)["cropping_mode"] != "slice":
        raise Unfusable("resample='bicubic' has no fused step")


def _crop(kind: str, module: nn.Module) -> Step:
    _require_whole_pixels(module)
    flags = _flags(module)
    mode = str(flags["padding_mode"])
    if mode not in ("constant", "reflect", "replicate"):
        raise Unfusable(f"padding_mode={mode!r} has no fused step")
    if mode != "constant" and any(_floats(flags["fill"])):
        raise Unfusable(f"padding_mode={mode!r} does not take a fill")
    padding = flags["padding"]
    if padding is None:
        left = top = right = bottom = 0
    elif isinstance(padding, int):
        left = top = right = bottom = padding
    elif len(padding) == 2:
        left, top = right, bottom = padding
    else:
        left, top, right, bottom = padding
    if min(left, top, right, bottom) < 0:
        raise Unfusable("negative padding has no fused step")
    return Crop(
        kind,
        _pair(flags["size"]),
        padding=(int(left), int(right), int(top), int(bottom)),
        pad_if_needed=bool(flags["pad_if_needed"]),
        padding_mode=cast(Any, mode),
        fill=_floats(flags["fill"]),
        same_on_batch=_same(module),
    )


def _center_crop(kind: str, module: nn.Module) -> Step:
    _require_whole_pixels(module)
    return CenterCrop(kind, _pair(_flags(module)["size"]))


def _resized_crop(kind: str, module: nn.Module) -> Step:
    _require_always(module)
    flags = _flags(module)
    is_slice = flags["cropping_mode"] == "slice"
    interpolation = _interpolation(module, "exact" if is_slice else "round")
    if interpolation == "round":
        # Its places are often halfway between two pixels; only Kornia's own rounding
        # errors decide which one it takes.
        raise Unfusable("resample='nearest' with cropping_mode='resample'")
    generator = cast(Any, module)._param_generator
    scale, ratio = _floats(generator.scale), _floats(generator.ratio)
    return ResizedCrop(
        kind,
        _pair(flags["size"]),
        scale=(scale[0], scale[1]),
        ratio=(ratio[0], ratio[1]),
        interpolation=interpolation,
        # Resample mode maps the corner pixels' centres onto each other either way.
        align_corners=bool(flags["align_corners"]) or not is_slice,
        is_warped=not is_slice,
        same_on_batch=_same(module),
    )


def _resize(kind: str, module: nn.Module) -> Step:
    _require_always(module)
    flags = _flags(module)
    if flags["antialias"]:
        raise Unfusable("antialias=True has no fused step")
    size = flags["size"]
    return Resize(
        kind,
        int(size) if isinstance(size, int) else _pair(size),
        side=str(flags["side"]),
        interpolation=_interpolation(module, "exact"),
        align_corners=bool(flags["align_corners"]),
    )


def _flip(kind: str, module: nn.Module) -> Step:
    axis = "x" if kind == "RandomHorizontalFlip" else "y"
    return Flip(
        kind, cast(Any, axis), p=_probability(module), same_on_batch=_same(module)
    )


def _rotation(kind: str, module: nn.Module) -> Step:
    generator = cast(Any, module)._param_generator
    return Rotation(
        kind,
        _range(generator.sampler_dict["degrees"]),
        interpolation=_interpolation(module, "round"),
        p=_probability(module),
        same_on_batch=_same(module),
    )


def _affine(kind: str, module: nn.Module) -> Step:
    flags = _flags(module)
    draw = cast(Any, module)._param_generator
    fill = flags["fill_value"]
    if fill is not None and torch.as_tensor(fill).ndim > 1:
        raise Unfusable("fill_value differs within the image")
    translate: tuple[float, float] | None = None
    scale: tuple[float, ...] | None = None
    shear: tuple[float, float, float, float] | None = None
    if draw.translate_x_sampler is not None:
        translate = (
            float(draw.translate_x_sampler.high),
            float(draw.translate_y_sampler.high),
        )
    if draw.scale_2_sampler is not None:
        scale = _range(draw.scale_2_sampler)
        if draw.scale_4_sampler is not None:
            scale = (*scale, *_range(draw.scale_4_sampler))
    if draw.shear_x_sampler is not None:
        shear = (*_range(draw.shear_x_sampler), *_range(draw.shear_y_sampler))
    return Affine(
        kind,
        _range(draw.degree_sampler),
        translate=translate,
        scale=cast(Any, scale),
        shear=shear,
        interpolation=_interpolation(module, "round"),
        border=cast(Border, flags["padding_mode"].name.lower()),
        align_corners=bool(flags["align_corners"]),
        fill=(0.0,) if fill is None else _floats(fill),
        p=_probability(module),
        same_on_batch=_same(module),
    )


def _blur(kind: str, module: nn.Module) -> Step:
    flags = _flags(module)
    size = flags["kernel_size"]
    kernel = (size, size) if isinstance(size, int) else _pair(size)
    if any(side % 2 == 0 or not 1 <= side <= 15 for side in kernel):
        raise Unfusable(f"kernel_size={size} is not odd and at most 15")
    low, high = _range(cast(Any, module)._param_generator.sigma_sampler)
    if low <= 0.0:
        raise Unfusable("sigma can be 0, which Kornia refuses")
    return Blur(
        kind,
        kernel,
        (low, high),
        border=cast(Any, flags["border_type"].name.lower()),
        p=_probability(module),
        same_on_batch=_same(module),
    )


def _pointwise(kind: str, module: nn.Module) -> Step:
    flags = _flags(module)
    mean, std = flags["mean"], flags["std"]
    if any(value.ndim > 1 and value.shape[0] != 1 for value in (mean, std)):
        raise Unfusable("its statistics differ between samples")
    means, stds = _floats(mean), _floats(std)
    if len(means) != len(stds) and 1 not in (len(means), len(stds)):
        raise Unfusable(f"it has {len(means)} means and {len(stds)} deviations")
    if kind == "Normalize" and 0.0 in stds:
        raise Unfusable("its deviation is 0")
    channels = max(len(means), len(stds))
    means = means * (channels // len(means))
    stds = stds * (channels // len(stds))
    if kind == "Normalize":
        scale = tuple(1.0 / s for s in stds)
        bias = tuple(-m / s for m, s in zip(means, stds, strict=True))
    else:
        scale, bias = stds, means
    return Pointwise(kind, scale, bias, p=float(cast(Any, module).p))


def _jitter(kind: str, module: nn.Module) -> Step:
    draw = cast(Any, module)._param_generator
    ranges: dict[str, tuple[float, float] | None] = {}
    for name, neutral in _NEUTRAL.items():
        _require_float32(name, getattr(draw, name))
        low_high = _range(getattr(draw, f"{name}_sampler"))
        ranges[name] = None if low_high == (neutral, neutral) else low_high
    return Jitter(
        kind,
        **ranges,
        is_jiggle=kind == "ColorJiggle",
        order=cast(Any, module)._fixed_order,
        p=_probability(module),
        same_on_batch=_same(module),
    )


_NEUTRAL = {"brightness": 1.0, "contrast": 1.0, "saturation": 1.0, "hue": 0.0}


def _require_float32(name: str, value: Any) -> None:
    """Kornia computes a draw's numbers in the dtype of a range that is a tensor."""
    if isinstance(value, Tensor) and value.dtype != torch.float32:
        dtype = str(value.dtype).removeprefix("torch.")
        raise Unfusable(f"{name} is a tensor of {dtype}, not of float32")


def _grayscale(kind: str, module: nn.Module) -> Step:
    weights = cast(Any, module).rgb_weights
    if weights is not None and not isinstance(weights, Tensor):
        # RandomGrayscale(0.2) means p, and says rgb_weights: Kornia tells.
        raise Unfusable(f"rgb_weights is a {type(weights).__name__}, not a tensor")
    if weights is not None and weights.requires_grad:
        raise Unfusable("rgb_weights is learnt")
    return Grayscale(
        kind,
        () if weights is None else _floats(weights),
        p=_probability(module),
        same_on_batch=_same(module),
    )


def _erase(kind: str, module: nn.Module) -> Step:
    draw = cast(Any, module)._param_generator
    for name in ("scale", "ratio"):
        _require_float32(name, getattr(draw, name))
    scale, ratio = _floats(draw.scale), _floats(draw.ratio)
    return Erase(
        kind,
        (scale[0], scale[1]),
        (ratio[0], ratio[1]),
        value=float(draw.value),
        p=_probability(module),
        same_on_batch=_same(module),
    )


READERS: dict[str, Callable[[str, nn.Module], Step]] = {
    "RandomCrop": _crop,
    "CenterCrop": _center_crop,
    "RandomResizedCrop": _resized_crop,
    "Resize": _resize,
    "LongestMaxSize": _resize,
    "SmallestMaxSize": _resize,
    "RandomHorizontalFlip": _flip,
    "RandomVerticalFlip": _flip,
    "RandomRotation": _rotation,
    "RandomAffine": _affine,
    "RandomGaussianBlur": _blur,
    "Normalize": _pointwise,
    "Denormalize": _pointwise,
    "ColorJitter": _jitter,
    "ColorJiggle": _jitter,
    "RandomGrayscale": _grayscale,
    "RandomErasing": _erase,
}
"""By the class's name."""
