"""How do masks, boxes and keypoints follow the pixels?

Every sample's labels move by that sample's own maps. Masks pick the nearest pixel at
each step, as Kornia does, so their values and dtype stay. Keypoints are multiplied by
the product of the maps. Boxes are too, corner by corner, and come back as the smallest
upright boxes around them; a box's last pixel belongs to it (Kornia's ``xyxy_plus``).
What is erased in an image becomes 0 in its mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gpuprefetch.augment.apply_values import erase
from gpuprefetch.augment.column import Size
from gpuprefetch.augment.geometry import backward_map, compose, forward_map
from gpuprefetch.augment.plan import Plan
from gpuprefetch.augment.reference import apply_steps
from gpuprefetch.augment.steps import (
    Affine,
    Crop,
    Geometric,
    Resize,
    ResizedCrop,
    Rotation,
)
from gpuprefetch.augment.values import Erase
from gpuprefetch.errors import TransformError

__all__ = [
    "LABELS",
    "changes_labels",
    "forward_matrix",
    "mask_settings_reason",
    "move_boxes",
    "move_keypoints",
    "move_labels",
    "move_mask",
]

LABELS = ("mask", "bbox", "bbox_xyxy", "bbox_xywh", "keypoints", "label", "class")
"""The data keys, besides images, that can follow fused steps."""


def forward_matrix(plan: Plan, pack: Tensor, size: Size) -> Tensor:
    """From places in the image to places in the result, (B, 3, 3), float32."""
    total = torch.eye(2, 3, device=pack.device).expand(pack.shape[0], 2, 3)
    for step, columns, before in plan.walk(size):
        if isinstance(step, Geometric):
            total = compose(total, backward_map(step, columns, pack, before))
    return forward_map(total)


def move_mask(plan: Plan, pack: Tensor, mask: Tensor) -> Tensor:
    """A mask (B, C, H, W) of any dtype; the dtype is kept."""
    for step, columns, _ in plan.walk((mask.shape[-2], mask.shape[-1])):
        if isinstance(step, Geometric):
            mask = apply_steps([(_for_masks(step), columns)], mask, pack)
        elif isinstance(step, Erase):
            mask = erase(columns, pack, mask, value=mask.new_zeros(()))
    return mask


def _for_masks(step: Geometric) -> Geometric:
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
    """Points (..., N, 2) as (x, y); ``matrix`` is (B, 3, 3) or (3, 3).

    Floating points keep their dtype, others become float32.
    """
    linear, shift = matrix[..., :2, :2], matrix[..., :2, 2]
    floats = points.to(matrix.dtype)
    moved = floats @ linear.transpose(-1, -2) + shift[..., None, :]
    return _like(moved, points)


def _like(moved: Tensor, before: Tensor) -> Tensor:
    """In the dtype that came; moved whole numbers are no whole numbers any more."""
    return moved.to(before.dtype) if before.is_floating_point() else moved


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
        return _like(_clockwise(left, top, right, bottom), boxes)
    if mode == "bbox_xywh":
        right, bottom = right - left + 1, bottom - top + 1
    return _like(torch.stack((left, top, right, bottom), -1), boxes)


def _clockwise(left: Tensor, top: Tensor, right: Tensor, bottom: Tensor) -> Tensor:
    flat = (left, top, right, top, right, bottom, left, bottom)
    stacked = torch.stack(flat, -1)
    return stacked.view(*stacked.shape[:-1], 4, 2)


def move_labels(
    plan: Plan, pack: Tensor, size: Size, *, keys: Sequence[str], labels: list[Any]
) -> list[Any]:
    """Labels of images of this size, one for each of the data keys ``keys``."""
    if not any(isinstance(step, Geometric | Erase) for step in plan.steps):
        return labels
    matrix = forward_matrix(plan, pack, size)
    return [
        _move_label(plan, pack, matrix, key, label)
        for key, label in zip(keys, labels, strict=True)
    ]


def _move_label(plan: Plan, pack: Tensor, matrix: Tensor, key: str, label: Any) -> Any:
    if key in ("label", "class"):
        return label
    if isinstance(label, list | tuple):
        if len(label) != len(pack):
            raise TransformError(
                f"a list of {len(label)} was passed as {key!r} for {len(pack)} images; "
                "pass one tensor for each image."
            )
        moved = [
            _move_label(plan, pack[i : i + 1], matrix[i], key, one)
            for i, one in enumerate(label)
        ]
        return type(label)(moved)
    if key == "mask":
        return _move_mask(plan, pack, label)
    if len(pack) == 1 and label.ndim == (3 if key == "bbox" else 2):
        matrix = matrix.view(3, 3)  # Of one image without a batch dimension.
    return (
        move_keypoints(matrix, label)
        if key == "keypoints"
        else move_boxes(matrix, label, key)
    )


def _move_mask(plan: Plan, pack: Tensor, mask: Tensor) -> Tensor:
    """A mask of rank 4, 3 (B, H, W or one C, H, W) or 2; the rank is kept."""
    if mask.ndim == 4:
        return move_mask(plan, pack, mask)
    if mask.ndim == 3 and mask.shape[0] == pack.shape[0]:
        return move_mask(plan, pack, mask[:, None])[:, 0]
    if mask.ndim == 3:
        return move_mask(plan, pack, mask[None])[0]
    return move_mask(plan, pack, mask[None, None])[0, 0]


# Which members and settings matter #


def changes_labels(module: nn.Module) -> bool:
    """Whether labels have to follow a member; of the unknown that is assumed."""
    names = {base.__name__ for base in type(module).__mro__}
    # RandomErasing erases masks too.
    return "IntensityAugmentationBase2D" not in names or "RandomErasing" in names


def mask_settings_reason(module: nn.Module) -> str:
    """Why the labels of a container have to be moved by Kornia; empty: they need not.

    By default a container of Kornia's reads masks as the nearest pixel.
    """
    extra = getattr(module, "extra_args", None) or {}
    for key, settings in extra.items():
        usual = str(getattr(key, "name", key)).lower() == "mask" and all(
            name == "align_corners"
            or str(getattr(value, "name", value)).lower() == "nearest"
            for name, value in settings.items()
        )
        if not usual:
            return "extra_args say how labels are moved"
    return ""
