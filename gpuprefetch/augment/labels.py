"""How do masks, boxes and keypoints follow the pixels?

Every sample's labels move by that sample's own maps. Masks pick the nearest pixel at
each step, as Kornia does, so their values and dtype stay. Keypoints are multiplied by
the product of the maps. Boxes are too, corner by corner, and come back as the smallest
upright boxes around them; a box's last pixel belongs to it (Kornia's ``xyxy_plus``).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from gpuprefetch.augment.geometry import backward_map, compose, forward_map
from gpuprefetch.augment.plan import (
    Affine,
    Blur,
    Crop,
    Plan,
    Pointwise,
    Resize,
    ResizedCrop,
    Rotation,
    Size,
    Step,
)
from gpuprefetch.augment.reference import apply_steps

__all__ = ["forward_matrix", "move_boxes", "move_keypoints", "move_mask"]


def forward_matrix(plan: Plan, pack: Tensor, size: Size) -> Tensor:
    """From places in the image to places in the result, (B, 3, 3), float32."""
    total = torch.eye(2, 3, device=pack.device).expand(pack.shape[0], 2, 3)
    for step, columns, before in plan.walk(size):
        if not isinstance(step, Blur | Pointwise):
            total = compose(total, backward_map(step, columns, pack, before))
    return forward_map(total)


def move_mask(plan: Plan, pack: Tensor, mask: Tensor) -> Tensor:
    """A mask (B, C, H, W) of any dtype; the dtype is kept."""
    chain = [
        (_for_masks(step), columns)
        for step, columns, _ in plan.walk((mask.shape[-2], mask.shape[-1]))
        if not isinstance(step, Blur | Pointwise)
    ]
    return apply_steps(chain, mask, pack)


def _for_masks(step: Step) -> Step:
    """The step that reads the nearest pixel; fills that differ by channel become 0."""
    match step:
        case ResizedCrop(is_warped=True):
            return replace(step, interpolation="round")
        case Resize() | ResizedCrop():
            return replace(step, interpolation="exact")
        case Rotation():
            return replace(step, interpolation="round")
        case Affine():
            fill = step.fill if len(step.fill) == 1 else (0.0,)
            return replace(step, interpolation="round", fill=fill)
        case Crop() if len(step.fill) > 1:
            return replace(step, fill=(0.0,))
        case _:
            return step


def move_keypoints(matrix: Tensor, points: Tensor) -> Tensor:
    """Points (..., N, 2) as (x, y); ``matrix`` is (B, 3, 3) or (3, 3)."""
    linear, shift = matrix[..., :2, :2], matrix[..., :2, 2]
    floats = points.to(matrix.dtype)
    return (floats @ linear.transpose(-1, -2) + shift[..., None, :]).to(points.dtype)


def move_boxes(matrix: Tensor, boxes: Tensor, mode: str) -> Tensor:
    """Boxes as ``bbox`` (..., N, 4, 2), ``bbox_xyxy`` or ``bbox_xywh`` (..., N, 4)."""
    floats = boxes.to(matrix.dtype)
    if mode == "bbox":
        corners = floats
    else:
        left, top, third, fourth = floats.unbind(-1)
        right = left + third - 1 if mode == "bbox_xywh" else third
        bottom = top + fourth - 1 if mode == "bbox_xywh" else fourth
        corners = _clockwise(left, top, right, bottom)
    moved = move_keypoints(matrix, corners.flatten(-3, -2)).view_as(corners)
    left, top = moved.amin(-2).unbind(-1)
    right, bottom = moved.amax(-2).unbind(-1)
    if mode == "bbox":
        return _clockwise(left, top, right, bottom)
    if mode == "bbox_xywh":
        return torch.stack((left, top, right - left + 1, bottom - top + 1), -1)
    return torch.stack((left, top, right, bottom), -1)


def _clockwise(left: Tensor, top: Tensor, right: Tensor, bottom: Tensor) -> Tensor:
    flat = (left, top, right, top, right, bottom, left, bottom)
    stacked = torch.stack(flat, -1)
    return stacked.view(*stacked.shape[:-1], 4, 2)
