"""The plan in plain torch operations, on any device: slow, short, and the yardstick.

Images are (B, C, H, W), float32, in the units of the steps ([0, 1] for images that were
integers). ``chained`` resamples once per step, as Kornia does. ``single`` composes the
geometry into one map and resamples once; see :func:`_single`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from gpuprefetch.augment.geometry import backward_map, compose, is_changed
from gpuprefetch.augment.plan import (
    Affine,
    Blur,
    Border,
    CenterCrop,
    Crop,
    Flip,
    Geometric,
    Interpolation,
    Outside,
    Plan,
    Pointwise,
    Resampling,
    ResizedCrop,
    Rotation,
    Size,
    Step,
    split_launches,
)

__all__ = ["apply_plan", "apply_steps"]

_Chain: TypeAlias = list[tuple[Geometric, Mapping[str, int], Size]]
"""Geometric steps, their columns, and the size of the image that each gets."""


def apply_plan(
    plan: Plan,
    image: Tensor,
    pack: Tensor,
    *,
    resampling: Resampling = "chained",
    outside: Outside = "zeros",
) -> Tensor:
    """Run the plan.

    Args:
        plan: What to do.
        image: (B, C, H, W), float32.
        pack: (B, n), float32, on the image's device.
        resampling: Once per step, or once in all.
        outside: For ``single``: what a warp sees beyond a crop; black, or the image.

    Returns:
        (B, C, h, w), float32, contiguous.
    """
    walk = list(plan.walk((image.shape[-2], image.shape[-1])))
    for launch in split_launches(plan):
        steps = walk[launch.first : launch.last]
        geometry = [one for one in steps if not isinstance(one[0], Blur | Pointwise)]
        if geometry:
            image = _resample(image, pack, geometry, resampling, outside)
        for step, columns, _ in steps[len(geometry) :]:
            if isinstance(step, Blur):
                image = _blur(step, columns, pack, image)
            elif isinstance(step, Pointwise):
                image = _pointwise(step, columns, pack, image)
    return image.contiguous()


def _resample(
    image: Tensor,
    pack: Tensor,
    chain: list[tuple[Step, Mapping[str, int], Size]],
    resampling: Resampling,
    outside: Outside,
) -> Tensor:
    """The geometry of one pass; with one resampling step both ways are the same."""
    resampled = sum(not _is_whole(step) for step, _, _ in chain)
    if resampling == "single" and resampled > (outside == "zeros"):
        return _single(image, pack, cast(_Chain, chain), outside)
    return apply_steps([(step, columns) for step, columns, _ in chain], image, pack)


def apply_steps(
    chain: Sequence[tuple[Step, Mapping[str, int]]], image: Tensor, pack: Tensor
) -> Tensor:
    """Geometric steps one after the other; any dtype if they only pick pixels."""
    for step, columns in chain:
        if not isinstance(step, Blur | Pointwise):
            image = _apply(step, columns, pack, image)
    return image.contiguous()


# Geometry #


@dataclass(frozen=True, slots=True)
class _Bounds:
    """The frame that a map reads, per sample: first and last pixel along x and y."""

    x: tuple[Tensor, Tensor]
    y: tuple[Tensor, Tensor]


def _frame(image: Tensor) -> _Bounds:
    height, width = image.shape[-2:]
    start = torch.zeros((image.shape[0], 1, 1), device=image.device)
    return _Bounds((start, start + (width - 1)), (start, start + (height - 1)))


def _apply(
    step: Geometric, columns: Mapping[str, int], pack: Tensor, image: Tensor
) -> Tensor:
    """One geometric step, resampled on its own."""
    size: Size = (image.shape[-2], image.shape[-1])
    matrix = backward_map(step, columns, pack, size)
    interpolation, border, fill = _reading(step)
    bounds = _frame(image)
    if isinstance(step, Crop):
        margins = step.margins(size)
        if any(margins):
            image = _pad(step, image, margins)
            shift = matrix.new_tensor([[0, 0, margins[0]], [0, 0, margins[2]]])
            matrix, bounds = matrix + shift, _frame(image)
    elif isinstance(step, ResizedCrop):
        left, top, width, height = (
            pack[:, columns[name], None, None]
            for name in ("left", "top", "width", "height")
        )
        bounds = _Bounds((left, left + width - 1), (top, top + height - 1))
    if interpolation == "exact":
        return _read_exact(image, matrix, step.output_size(size), bounds)
    u, v = _places(matrix, step.output_size(size))
    align = isinstance(step, Affine) and step.align_corners
    return _read(image, u, v, bounds, interpolation, border, fill, align_corners=align)


def _reading(step: Geometric) -> tuple[Interpolation, Border, tuple[float, ...]]:
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


def _pad(step: Crop, image: Tensor, margins: tuple[int, int, int, int]) -> Tensor:
    if step.padding_mode != "constant":
        # Torch pads integers with a constant only; float64 holds every pixel's number.
        floats = image if image.is_floating_point() else image.double()
        return F.pad(floats, margins, mode=step.padding_mode).to(image.dtype)
    if len(step.fill) == 1:
        return F.pad(image, margins, value=step.fill[0])
    planes = zip(torch.split(image, 1, 1), step.fill, strict=True)
    return torch.cat([F.pad(plane, margins, value=fill) for plane, fill in planes], 1)


def _places(matrix: Tensor, size: Size) -> tuple[Tensor, Tensor]:
    """Where the output pixels lie in the input: two (B, h, w) tensors."""
    x = torch.arange(size[1], device=matrix.device, dtype=torch.float32)
    y = torch.arange(size[0], device=matrix.device, dtype=torch.float32)[:, None]
    m = matrix[:, :, :, None, None]
    u = m[:, 0, 0] * x + m[:, 0, 1] * y + m[:, 0, 2]
    v = m[:, 1, 0] * x + m[:, 1, 1] * y + m[:, 1, 2]
    return u, v


def _read(
    image: Tensor,
    u: Tensor,
    v: Tensor,
    bounds: _Bounds,
    interpolation: Interpolation,
    border: Border,
    fill: tuple[float, ...] = (0.0,),
    *,
    align_corners: bool = False,
) -> Tensor:
    """Values at the places (u, v): ``grid_sample`` in pixel coordinates."""
    if border == "reflection":
        u = _reflect(u, *bounds.x, align_corners=align_corners)
        v = _reflect(v, *bounds.y, align_corners=align_corners)
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


def _is_inside(x: Tensor, y: Tensor, bounds: _Bounds) -> Tensor:
    inside = (x >= bounds.x[0]) & (x <= bounds.x[1])
    return inside & (y >= bounds.y[0]) & (y <= bounds.y[1])


def _gather(image: Tensor, x: Tensor, y: Tensor, bounds: _Bounds) -> Tensor:
    """The pixels at whole places (x, y); places outside are moved into the frame."""
    column, row = x.clamp(*bounds.x).long(), y.clamp(*bounds.y).long()
    flat = (row * image.shape[-1] + column).flatten(1)[:, None]
    picked = image.flatten(2).gather(2, flat.expand(-1, image.shape[1], -1))
    return picked.view(image.shape[0], image.shape[1], *x.shape[-2:])


def _pick(
    image: Tensor,
    x: Tensor,
    y: Tensor,
    bounds: _Bounds,
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


def _reflect(u: Tensor, low: Tensor, high: Tensor, *, align_corners: bool) -> Tensor:
    """Fold a coordinate back into the frame, about its pixels' centres or edges."""
    if not align_corners:
        low, high = low - 0.5, high + 0.5
    span = high - low
    folded = (u - low).abs()
    flips = (folded / span).floor()
    rest = folded - flips * span
    inside = torch.where(flips % 2 == 0, rest + low, high - rest)
    return torch.where(span > 0, inside, torch.zeros_like(u) + low)


def _read_exact(image: Tensor, matrix: Tensor, size: Size, bounds: _Bounds) -> Tensor:
    """``interpolate(mode="nearest-exact")`` of the frame: pixel floor((i + 0.5) s)."""
    x = torch.arange(size[1], device=matrix.device, dtype=torch.float32) + 0.5
    y = torch.arange(size[0], device=matrix.device, dtype=torch.float32)[:, None] + 0.5
    u = (x * matrix[:, 0, 0, None, None]).floor() + bounds.x[0]
    v = (y * matrix[:, 1, 1, None, None]).floor() + bounds.y[0]
    shape = (image.shape[0], *size)
    return _read(image, u.expand(shape), v.expand(shape), bounds, "round", "border")


def _single(
    image: Tensor,
    pack: Tensor,
    chain: _Chain,
    outside: Outside,
) -> Tensor:
    """All geometry of the chain in one read.

    ``extend``: the maps are multiplied into one, and what lies beyond the image is
    black. ``zeros``: the place of an output pixel is followed from the last step to the
    first. Where a warp leaves its frame the value fades to black over one pixel of that
    frame, as Kornia's own resampling does; every other step keeps the place inside its
    frame.
    """
    size = chain[-1][0].output_size(chain[-1][2])
    maps = [
        backward_map(step, columns, pack, before) for step, columns, before in chain
    ]
    readings = [_reading(step)[0] for step, _, _ in chain if not _is_whole(step)]
    interpolation: Interpolation = (
        "bilinear" if not readings or "bilinear" in readings else "round"
    )
    if outside == "extend":
        matrix = maps[-1]
        for inner in reversed(maps[:-1]):
            matrix = compose(inner, matrix)
        return _read(
            image, *_places(matrix, size), _frame(image), interpolation, "zeros"
        )
    u, v = _places(backward_identity(pack), size)
    weight = torch.ones_like(u)[:, None]
    added = torch.zeros_like(u)[:, None]
    for (step, columns, before), matrix in zip(
        reversed(chain), reversed(maps), strict=True
    ):
        m = matrix[:, :, :, None, None]
        u, v = (
            m[:, 0, 0] * u + m[:, 0, 1] * v + m[:, 0, 2],
            m[:, 1, 0] * u + m[:, 1, 1] * v + m[:, 1, 2],
        )
        u, v, inside, fill = _enter(step, columns, pack, before, u, v, interpolation)
        if inside is not None:
            value = image.new_tensor(fill).view(1, -1, 1, 1)
            added = added + weight * (1 - inside)[:, None] * value
            weight = weight * inside[:, None]
    return _read(image, u, v, _frame(image), interpolation, "border") * weight + added


def backward_identity(pack: Tensor) -> Tensor:
    """The map that moves nothing, (B, 2, 3)."""
    return torch.eye(2, 3, device=pack.device).expand(pack.shape[0], 2, 3)


def _enter(
    step: Geometric,
    columns: Mapping[str, int],
    pack: Tensor,
    size: Size,
    u: Tensor,
    v: Tensor,
    interpolation: Interpolation,
) -> tuple[Tensor, Tensor, Tensor | None, tuple[float, ...]]:
    """Keep a place inside the frame that a step reads.

    Returns the place, how much of it lies inside (None: all), and what lies outside.
    """
    start = torch.zeros((u.shape[0], 1, 1), device=u.device)
    bounds = _Bounds((start, start + (size[1] - 1)), (start, start + (size[0] - 1)))
    border: str = _reading(step)[1]
    fill: tuple[float, ...] = (0.0,)
    align_corners = True
    if isinstance(step, Affine):
        fill, align_corners = step.fill, step.align_corners
    elif isinstance(step, Crop):
        modes = {"constant": "fill", "reflect": "reflection", "replicate": "border"}
        border, fill = modes[step.padding_mode], step.fill
    elif isinstance(step, ResizedCrop):
        left, top, width, height = (
            pack[:, columns[name], None, None]
            for name in ("left", "top", "width", "height")
        )
        bounds = _Bounds((left, left + width - 1), (top, top + height - 1))
    inside: Tensor | None = None
    if border in ("zeros", "fill"):
        fill = fill if border == "fill" else (0.0,)
        inside = _share_inside(u, *bounds.x, interpolation)
        inside = inside * _share_inside(v, *bounds.y, interpolation)
    elif border == "reflection":
        u = _reflect(u, *bounds.x, align_corners=align_corners)
        v = _reflect(v, *bounds.y, align_corners=align_corners)
    return u.clamp(*bounds.x), v.clamp(*bounds.y), inside, fill


def _share_inside(
    u: Tensor, low: Tensor, high: Tensor, interpolation: Interpolation
) -> Tensor:
    """1 inside the frame, fading to 0 over one pixel beyond it."""
    if interpolation != "bilinear":
        u = u.round()
    return (u - low + 1).clamp(0, 1) * (high + 1 - u).clamp(0, 1)


def _is_whole(step: Step) -> bool:
    """Whether the step only picks pixels."""
    return isinstance(step, Crop | CenterCrop | Flip)


# Values #


def _blur(
    step: Blur, columns: Mapping[str, int], pack: Tensor, image: Tensor
) -> Tensor:
    """Rows, then columns; ``exp(-d^2 / (2 sigma^2))`` normalized to sum 1."""
    sigma = pack[:, columns["sigma"], None]
    changed = is_changed(columns, pack)
    blurred = image
    for axis, taps in ((-1, step.kernel_size[1]), (-2, step.kernel_size[0])):
        radius = taps // 2
        offsets = torch.arange(-radius, radius + 1, device=image.device)
        weights = torch.exp(-0.5 * (offsets / sigma) ** 2)
        weights = weights / weights.sum(1, keepdim=True)
        margins = (radius, radius, 0, 0) if axis == -1 else (0, 0, radius, radius)
        padded = F.pad(blurred, margins, mode=step.border) if radius else blurred
        length = blurred.shape[axis]
        blurred = sum(
            (
                padded.narrow(axis, tap, length) * weights[:, tap, None, None, None]
                for tap in range(taps)
            ),
            start=torch.zeros_like(blurred),
        )
    if changed is None:
        return blurred
    return torch.where(changed[:, None, None, None], blurred, image)


def _pointwise(
    step: Pointwise, columns: Mapping[str, int], pack: Tensor, image: Tensor
) -> Tensor:
    scale = image.new_tensor(step.scale).view(1, -1, 1, 1)
    bias = image.new_tensor(step.bias).view(1, -1, 1, 1)
    changed = is_changed(columns, pack)
    mapped = image * scale + bias
    if changed is None:
        return mapped
    return torch.where(changed[:, None, None, None], mapped, image)
