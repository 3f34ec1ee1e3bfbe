"""Where does each output pixel of a step lie in the step's input?

Every geometric step is an affine map per sample. The maps here go backwards, from the
pixel of the output to a place in the input: ``u = m[0,0] x + m[0,1] y + m[0,2]`` and
``v = m[1,0] x + m[1,1] y + m[1,2]``. Pixel centres are whole numbers, y points down.
Matrices are (B, 2, 3), float32, on the pack's device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from gpuprefetch.augment.column import Size
from gpuprefetch.augment.steps import (
    Affine,
    CenterCrop,
    Crop,
    Flip,
    Geometric,
    Resize,
    ResizedCrop,
    Rotation,
)

__all__ = ["backward_map", "compose", "forward_map", "is_changed"]


def is_changed(columns: Mapping[str, int], pack: Tensor) -> Tensor | None:
    """Which samples the step changes, (B,) bool; None: all of them."""
    return pack[:, columns["skip"]] == 0 if "skip" in columns else None


def backward_map(
    step: Geometric, columns: Mapping[str, int], pack: Tensor, size: Size
) -> Tensor:
    """The step's map from output pixels to places in its input of this size."""
    match step:
        case Crop():
            left, _, top, _ = step.margins(size)
            x = pack[:, columns["left"]] - left
            y = pack[:, columns["top"]] - top
            return _rows(pack, 1.0, 0.0, x, 0.0, 1.0, y)
        case CenterCrop():
            origin_x, origin_y = step.origin(size)
            return _rows(pack, 1.0, 0.0, float(origin_x), 0.0, 1.0, float(origin_y))
        case ResizedCrop():
            factor_x, start_x = _scaling(step, pack[:, columns["width"]], step.size[1])
            factor_y, start_y = _scaling(step, pack[:, columns["height"]], step.size[0])
            start_x = start_x + pack[:, columns["left"]]
            start_y = start_y + pack[:, columns["top"]]
            return _rows(pack, factor_x, 0.0, start_x, 0.0, factor_y, start_y)
        case Resize():
            height, width = step.output_size(size)
            factor_x, start_x = _scaling(step, pack.new_tensor(float(size[1])), width)
            factor_y, start_y = _scaling(step, pack.new_tensor(float(size[0])), height)
            return _rows(pack, factor_x, 0.0, start_x, 0.0, factor_y, start_y)
        case Flip(axis="x"):
            matrix = _rows(pack, -1.0, 0.0, size[1] - 1.0, 0.0, 1.0, 0.0)
        case Flip():
            matrix = _rows(pack, 1.0, 0.0, 0.0, 0.0, -1.0, size[0] - 1.0)
        case Rotation():
            radians = pack[:, columns["degrees"]] * (math.pi / 180.0)
            cos, sin = radians.cos(), radians.sin()
            matrix = _about_centre((cos, -sin, sin, cos), (0.0, 0.0), size)
        case Affine():
            matrix = _affine(columns, pack, size)
    changed = is_changed(columns, pack)
    if changed is None:
        return matrix
    identity = _rows(pack, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0)
    return torch.where(changed[:, None, None], matrix, identity)


def _scaling(
    step: Resize | ResizedCrop, before: Tensor, after: int
) -> tuple[Tensor, Tensor]:
    """Factor and start of a resize of one axis, those of ``F.interpolate``."""
    if step.align_corners and step.interpolation != "exact":
        factor = (before - 1.0) / (after - 1.0) if after > 1 else before * 0.0
        return factor, before * 0.0
    factor = before / after
    return factor, factor * 0.5 - 0.5


def _affine(columns: Mapping[str, int], pack: Tensor, size: Size) -> Tensor:
    """Inverse of ``kornia.geometry.transform.get_affine_matrix2d``.

    Forward: out = c + shift + R(-degrees) diag(scale) S (p - c), with the shear
    S = [[1, -tan x], [-tan y, 1 + tan x tan y]] and the centre c.
    """

    def number(name: str, otherwise: float) -> Tensor:
        if name in columns:
            return pack[:, columns[name]]
        return torch.full_like(pack[:, 0], otherwise)

    radians = number("degrees", 0.0) * (math.pi / 180.0)
    cos, sin = radians.cos(), radians.sin()
    scale_x = number("scale_x", 1.0)
    scale_y = number("scale_y", 1.0) if "scale_y" in columns else scale_x
    tan_x = (number("shear_x", 0.0) * (math.pi / 180.0)).tan()
    tan_y = (number("shear_y", 0.0) * (math.pi / 180.0)).tan()
    # The shear's determinant is 1 and R is a rotation, so the inverse is
    # S^-1 diag(1 / scale) R(degrees) with S^-1 = [[1 + tan x tan y, tan x], [tan y,
    # 1]].
    top_x, top_y = cos / scale_x, sin / scale_x
    low_x, low_y = -sin / scale_y, cos / scale_y
    both = 1.0 + tan_x * tan_y
    inverse = (
        both * top_x + tan_x * low_x,
        both * top_y + tan_x * low_y,
        tan_y * top_x + low_x,
        tan_y * top_y + low_y,
    )
    shift = number("shift_x", 0.0), number("shift_y", 0.0)
    return _about_centre(inverse, shift, size)


def _about_centre(
    linear: tuple[Tensor, Tensor, Tensor, Tensor],
    shift: tuple[Tensor | float, Tensor | float],
    size: Size,
) -> Tensor:
    """The map ``c + L (p - c - shift)`` with the centre c of an image of this size."""
    xx, xy, yx, yy = linear
    centre_x, centre_y = (size[1] - 1) / 2, (size[0] - 1) / 2
    from_x, from_y = shift[0] + centre_x, shift[1] + centre_y
    x0 = centre_x - (xx * from_x + xy * from_y)
    y0 = centre_y - (yx * from_x + yy * from_y)
    return torch.stack((xx, xy, x0, yx, yy, y0), -1).view(-1, 2, 3)


def _rows(pack: Tensor, *entries: Tensor | float) -> Tensor:
    """A (B, 2, 3) matrix from its six entries, row by row."""
    full = [
        entry.expand(pack.shape[0])
        if isinstance(entry, Tensor)
        else pack.new_full((pack.shape[0],), entry)
        for entry in entries
    ]
    return torch.stack(full, -1).view(-1, 2, 3)


def compose(inner: Tensor, outer: Tensor) -> Tensor:
    """Backward map of two steps in a row: output -> ``outer`` -> ``inner`` -> input."""
    linear = inner[:, :, :2] @ outer
    return torch.cat((linear[:, :, :2], linear[:, :, 2:] + inner[:, :, 2:]), 2)


def forward_map(backward: Tensor) -> Tensor:
    """The 3x3 matrix from input places to output places, (B, 3, 3)."""
    xx, xy, x0 = backward[:, 0].unbind(-1)
    yx, yy, y0 = backward[:, 1].unbind(-1)
    determinant = xx * yy - xy * yx
    a, b, c, d = (
        yy / determinant,
        -xy / determinant,
        -yx / determinant,
        xx / determinant,
    )
    zero, one = torch.zeros_like(a), torch.ones_like(a)
    entries = (a, b, -(a * x0 + b * y0), c, d, -(c * x0 + d * y0), zero, zero, one)
    return torch.stack(entries, -1).view(-1, 3, 3)
