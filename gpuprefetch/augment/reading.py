"""Which value does an image have at places between and beyond its pixels?

``grid_sample`` and ``interpolate`` in pixel coordinates, with frames per sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gpuprefetch.augment.column import Size
from gpuprefetch.augment.steps import (
    Affine,
    Border,
    CenterCrop,
    Crop,
    Flip,
    Geometric,
    Interpolation,
    Rotation,
    Step,
)

__all__ = [
    "Bounds",
    "frame_of",
    "frame_of_size",
    "is_whole",
    "places",
    "read",
    "read_exact",
    "reading_of",
    "reflect",
    "window_of",
]


@dataclass(frozen=True, slots=True)
class Bounds:
    """The frame that a map reads, per sample: first and last pixel along x and y."""

    x: tuple[Tensor, Tensor]
    y: tuple[Tensor, Tensor]


def frame_of(image: Tensor) -> Bounds:
    """The whole of each image."""
    height, width = image.shape[-2:]
    return frame_of_size((height, width), image)


def frame_of_size(size: Size, like: Tensor) -> Bounds:
    """The whole of images of that size, as many as ``like`` has samples."""
    start = torch.zeros((like.shape[0], 1, 1), device=like.device)
    return Bounds((start, start + (size[1] - 1)), (start, start + (size[0] - 1)))


def window_of(pack: Tensor, columns: Mapping[str, int]) -> Bounds:
    """The part of each image that a ``ResizedCrop`` cuts out."""
    left, top, width, height = (
        pack[:, columns[name], None, None]
        for name in ("left", "top", "width", "height")
    )
    return Bounds((left, left + width - 1), (top, top + height - 1))


def is_whole(step: Step) -> bool:
    """Whether the step only picks pixels."""
    return isinstance(step, Crop | CenterCrop | Flip)


def reading_of(step: Geometric) -> tuple[Interpolation, Border, tuple[float, ...]]:
    """How a step reads between pixels and beyond the frame."""
    match step:
        case Affine():
            return step.interpolation, step.border, step.fill
        case Rotation():
            return step.interpolation, "zeros", (0.0,)
        case Crop() | CenterCrop() | Flip():
            return "round", "border", (0.0,)
        case _:
            return step.interpolation, "border", (0.0,)


def places(matrix: Tensor, size: Size) -> tuple[Tensor, Tensor]:
    """Where the output pixels lie in the input: two (B, h, w) tensors."""
    x = torch.arange(size[1], device=matrix.device, dtype=torch.float32)
    y = torch.arange(size[0], device=matrix.device, dtype=torch.float32)[:, None]
    m = matrix[:, :, :, None, None]
    u = m[:, 0, 0] * x + m[:, 0, 1] * y + m[:, 0, 2]
    v = m[:, 1, 0] * x + m[:, 1, 1] * y + m[:, 1, 2]
    return u, v


def read(
    image: Tensor,
    u: Tensor,
    v: Tensor,
    bounds: Bounds,
    interpolation: Interpolation,
    border: Border,
    fill: tuple[float, ...] = (0.0,),
    *,
    align_corners: bool = False,
) -> Tensor:
    """Values at the places (u, v): ``grid_sample`` in pixel coordinates."""
    if border == "reflection":
        u = reflect(u, *bounds.x, align_corners=align_corners)
        v = reflect(v, *bounds.y, align_corners=align_corners)
    if border in ("border", "reflection"):
        u = u.clamp(*bounds.x)
        v = v.clamp(*bounds.y)
    if interpolation != "bilinear":
        return _pick(image, u.round(), v.round(), bounds, border, fill)
    total = image.new_zeros((image.shape[0], image.shape[1], *u.shape[-2:]))
    covered = torch.zeros_like(u)
    left, top = u.floor(), v.floor()
    for y, weight_y in ((top, 1 - (v - top)), (top + 1, v - top)):
        for x, weight_x in ((left, 1 - (u - left)), (left + 1, u - left)):
            weight = _is_inside(x, y, bounds) * weight_x * weight_y
            total += weight[:, None] * _gather(image, x, y, bounds)
            covered += weight
    if border == "fill" and any(fill):
        value = image.new_tensor(fill).view(1, -1, 1, 1)
        total += (1 - covered)[:, None] * value
    return total


def _is_inside(x: Tensor, y: Tensor, bounds: Bounds) -> Tensor:
    inside = (x >= bounds.x[0]) & (x <= bounds.x[1])
    return inside & (y >= bounds.y[0]) & (y <= bounds.y[1])


def _gather(image: Tensor, x: Tensor, y: Tensor, bounds: Bounds) -> Tensor:
    """The pixels at whole places (x, y); places outside are moved into the frame."""
    column, row = x.clamp(*bounds.x).long(), y.clamp(*bounds.y).long()
    flat = (row * image.shape[-1] + column).flatten(1)[:, None]
    picked = image.flatten(2).gather(2, flat.expand(-1, image.shape[1], -1))
    return picked.view(image.shape[0], image.shape[1], *x.shape[-2:])


def _pick(
    image: Tensor,
    x: Tensor,
    y: Tensor,
    bounds: Bounds,
    border: Border,
    fill: tuple[float, ...],
) -> Tensor:
    """One pixel per place, no arithmetic: any dtype."""
    picked = _gather(image, x, y, bounds)
    if border not in ("zeros", "fill"):
        return picked
    value = torch.tensor(fill if border == "fill" else (0.0,), device=image.device)
    value = value.to(image.dtype).view(1, -1, 1, 1)
    return torch.where(_is_inside(x, y, bounds)[:, None], picked, value)


def reflect(u: Tensor, low: Tensor, high: Tensor, *, align_corners: bool) -> Tensor:
    """Fold a coordinate back into the frame, about its pixels' centres or edges."""
    if not align_corners:
        low, high = low - 0.5, high + 0.5
    span = high - low
    folded = (u - low).abs()
    flips = (folded / span).floor()
    rest = folded - flips * span
    inside = torch.where(flips % 2 == 0, rest + low, high - rest)
    return torch.where(span > 0, inside, torch.zeros_like(u) + low)


def read_exact(image: Tensor, matrix: Tensor, size: Size, bounds: Bounds) -> Tensor:
    """``interpolate(mode="nearest-exact")`` of the frame: pixel floor((i + 0.5) s)."""
    x = torch.arange(size[1], device=matrix.device, dtype=torch.float32) + 0.5
    y = torch.arange(size[0], device=matrix.device, dtype=torch.float32)[:, None] + 0.5
    u = (x * matrix[:, 0, 0, None, None]).floor() + bounds.x[0]
    v = (y * matrix[:, 1, 1, None, None]).floor() + bounds.y[0]
    shape = (image.shape[0], *size)
    return read(image, u.expand(shape), v.expand(shape), bounds, "round", "border")
