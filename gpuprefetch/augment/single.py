"""All geometry of a chain in one read, in plain torch operations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from gpuprefetch.augment.column import Size
from gpuprefetch.augment.geometry import backward_map, compose
from gpuprefetch.augment.plan import Outside
from gpuprefetch.augment.reading import (
    frame_of,
    frame_of_size,
    is_whole,
    places,
    read,
    reading_of,
    reflect,
    window_of,
)
from gpuprefetch.augment.steps import (
    Affine,
    Crop,
    Geometric,
    Interpolation,
    ResizedCrop,
)

__all__ = ["Chain", "apply_once"]

Chain: TypeAlias = list[tuple[Geometric, Mapping[str, int], Size]]
"""Geometric steps, their columns, and the size of the image that each gets."""


def apply_once(
    image: Tensor,
    pack: Tensor,
    chain: Chain,
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
    readings = [reading_of(step)[0] for step, _, _ in chain if not is_whole(step)]
    interpolation: Interpolation = (
        "bilinear" if not readings or "bilinear" in readings else "round"
    )
    if outside == "extend":
        matrix = maps[-1]
        for inner in reversed(maps[:-1]):
            matrix = compose(inner, matrix)
        return read(
            image, *places(matrix, size), frame_of(image), interpolation, "zeros"
        )
    u, v = places(backward_identity(pack), size)
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
    return read(image, u, v, frame_of(image), interpolation, "border") * weight + added


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
    bounds = frame_of_size(size, u)
    border: str = reading_of(step)[1]
    fill: tuple[float, ...] = (0.0,)
    align_corners = True
    if isinstance(step, Affine):
        fill, align_corners = step.fill, step.align_corners
    elif isinstance(step, Crop):
        modes = {"constant": "fill", "reflect": "reflection", "replicate": "border"}
        border, fill = modes[step.padding_mode], step.fill
    elif isinstance(step, ResizedCrop):
        bounds = window_of(pack, columns)
    inside: Tensor | None = None
    if border in ("zeros", "fill"):
        fill = fill if border == "fill" else (0.0,)
        inside = _share_inside(u, *bounds.x, interpolation)
        inside = inside * _share_inside(v, *bounds.y, interpolation)
    elif border == "reflection":
        u = reflect(u, *bounds.x, align_corners=align_corners)
        v = reflect(v, *bounds.y, align_corners=align_corners)
    return u.clamp(*bounds.x), v.clamp(*bounds.y), inside, fill


def _share_inside(
    u: Tensor, low: Tensor, high: Tensor, interpolation: Interpolation
) -> Tensor:
    """1 inside the frame, fading to 0 over one pixel beyond it."""
    if interpolation != "bilinear":
        u = u.round()
    return (u - low + 1).clamp(0, 1) * (high + 1 - u).clamp(0, 1)
