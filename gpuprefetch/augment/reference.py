"""The plan in plain torch operations, on any device: slow, short, and the yardstick.

Images are (B, C, H, W), float32, in the units of the steps ([0, 1] for images that were
integers). ``chained`` resamples once per step, as Kornia does. ``single`` composes the
geometry into one map and resamples once; see :func:`apply_once`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from gpuprefetch.augment.apply_values import change_values
from gpuprefetch.augment.column import Size
from gpuprefetch.augment.geometry import backward_map
from gpuprefetch.augment.launches import split_launches
from gpuprefetch.augment.plan import Outside, Plan, Resampling
from gpuprefetch.augment.reading import (
    frame_of,
    is_whole,
    places,
    read,
    read_exact,
    reading_of,
    window_of,
)
from gpuprefetch.augment.single import Chain, apply_once
from gpuprefetch.augment.steps import (
    Affine,
    Crop,
    Geometric,
    ResizedCrop,
    Step,
)

__all__ = ["apply_plan", "apply_steps"]


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
        geometry = [one for one in steps if isinstance(one[0], Geometric)]
        if geometry:
            image = _resample(image, pack, geometry, resampling, outside)
        for step, columns, _ in steps[len(geometry) :]:
            if not isinstance(step, Geometric):
                image = change_values(step, columns, pack, image)
    return image.contiguous()


def _resample(
    image: Tensor,
    pack: Tensor,
    chain: list[tuple[Step, Mapping[str, int], Size]],
    resampling: Resampling,
    outside: Outside,
) -> Tensor:
    """The geometry of one pass; with one resampling step both ways are the same."""
    resampled = sum(not is_whole(step) for step, _, _ in chain)
    if resampling == "single" and resampled > (outside == "zeros"):
        return apply_once(image, pack, cast(Chain, chain), outside)
    return apply_steps([(step, columns) for step, columns, _ in chain], image, pack)


def apply_steps(
    chain: Sequence[tuple[Step, Mapping[str, int]]], image: Tensor, pack: Tensor
) -> Tensor:
    """Geometric steps one after the other; any dtype if they only pick pixels."""
    for step, columns in chain:
        if isinstance(step, Geometric):
            image = _apply(step, columns, pack, image)
    return image.contiguous()


# Geometry #


def _apply(
    step: Geometric, columns: Mapping[str, int], pack: Tensor, image: Tensor
) -> Tensor:
    """One geometric step, resampled on its own."""
    size: Size = (image.shape[-2], image.shape[-1])
    matrix = backward_map(step, columns, pack, size)
    interpolation, border, fill = reading_of(step)
    bounds = frame_of(image)
    if isinstance(step, Crop):
        margins = step.margins(size)
        if any(margins):
            image = _pad(step, image, margins)
            shift = matrix.new_tensor([[0, 0, margins[0]], [0, 0, margins[2]]])
            matrix, bounds = matrix + shift, frame_of(image)
    elif isinstance(step, ResizedCrop):
        bounds = window_of(pack, columns)
    if interpolation == "exact":
        return read_exact(image, matrix, step.output_size(size), bounds)
    u, v = places(matrix, step.output_size(size))
    align = isinstance(step, Affine) and step.align_corners
    return read(image, u, v, bounds, interpolation, border, fill, align_corners=align)


def _pad(step: Crop, image: Tensor, margins: tuple[int, int, int, int]) -> Tensor:
    if step.padding_mode != "constant":
        # Torch pads integers with a constant only; float64 holds every pixel's number.
        floats = image if image.is_floating_point() else image.double()
        return F.pad(floats, margins, mode=step.padding_mode).to(image.dtype)
    if len(step.fill) == 1:
        return F.pad(image, margins, value=step.fill[0])
    planes = zip(torch.split(image, 1, 1), step.fill, strict=True)
    return torch.cat([F.pad(plane, margins, value=fill) for plane, fill in planes], 1)
