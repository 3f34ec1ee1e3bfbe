"""What does an augmentation chain do to an image, as plain data?

A :class:`Plan` is a tuple of frozen steps in the order in which they act. The numbers
of a batch form one float32 matrix, the *pack*: one row per sample, one column per
number, in plan order.

This file does not know where a plan comes from (``kornia_plan``), how the numbers
are drawn (``sample``) nor how the pixels are made (``reference``, ``kernel``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from gpuprefetch.augment.steps import (
    Affine,
    Blur,
    Column,
    Crop,
    Pointwise,
    Resize,
    ResizedCrop,
    Rotation,
    Size,
    Step,
)

__all__ = ["Launch", "Outside", "Plan", "Resampling", "split_launches"]

Resampling = Literal["chained", "single"]
"""Resample once per step, as Kornia does, or once in all."""

Outside = Literal["zeros", "extend"]
"""For ``single``: what a warp after a crop sees beyond the crop, black or the image."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Steps in the order in which they act, and where their numbers lie in the pack."""

    steps: tuple[Step, ...]
    layout: tuple[Mapping[str, int], ...] = field(init=False, compare=False)
    """Per step: the pack's column of each of its numbers. Whole numbers come first in
    the pack, so that they can be rounded down in one operation."""
    width: int = field(init=False, compare=False)
    """Number of columns of the pack; it does not depend on the image's size."""
    whole: int = field(init=False, compare=False)
    """How many of them, from the left, hold whole numbers."""

    def __post_init__(self) -> None:
        """Lay the columns out; image size does not matter for that."""
        named = [
            (index, column)
            for index, step in enumerate(self.steps)
            for column in step.columns((1, 1))
        ]
        ordered = sorted(named, key=lambda pair: not pair[1].is_whole)
        layout: list[dict[str, int]] = [{} for _ in self.steps]
        for position, (index, column) in enumerate(ordered):
            layout[index][column.name] = position
        object.__setattr__(self, "layout", tuple(layout))
        object.__setattr__(self, "width", len(ordered))
        object.__setattr__(self, "whole", sum(c.is_whole for _, c in named))

    def walk(self, size: Size) -> Iterator[tuple[Step, Mapping[str, int], Size]]:
        """Each step with its columns and the size of the image that it gets."""
        for step, columns in zip(self.steps, self.layout, strict=True):
            yield step, columns, size
            size = step.output_size(size)

    def output_size(self, size: Size) -> Size:
        """Size of what the last step returns."""
        for step in self.steps:
            size = step.output_size(size)
        return size

    def columns(self, size: Size) -> tuple[Column, ...]:
        """The pack's columns for images of this size, from left to right."""
        placed = {
            columns[column.name]: column
            for step, columns, before in self.walk(size)
            for column in step.columns(before)
        }
        return tuple(placed[position] for position in range(self.width))


@dataclass(frozen=True, slots=True)
class Launch:
    """Steps ``first`` to ``last`` (excluded) of a plan, which are done in one pass."""

    first: int
    last: int


def split_launches(plan: Plan) -> tuple[Launch, ...]:
    """Cut a plan where one pass cannot go on.

    A pass does geometry, then at most one blur, then pointwise steps. Padding ends a
    pass too, unless nothing was resampled or padded before it.
    """
    launches: list[Launch] = []
    first, stage, has_level, has_padding = 0, 0, False, False
    for index, step in enumerate(plan.steps):
        rank = 0 if not isinstance(step, Blur | Pointwise) else 1
        rank = 2 if isinstance(step, Pointwise) else rank
        pads = isinstance(step, Crop) and (any(step.padding) or step.pad_if_needed)
        if (
            rank < stage
            or (rank == stage == 1)
            or (pads and (has_level or has_padding))
        ):
            launches.append(Launch(first, index))
            first, has_level, has_padding = index, False, False
        stage = rank
        has_padding = has_padding or pads
        has_level = has_level or isinstance(
            step, Resize | ResizedCrop | Rotation | Affine
        )
    if first < len(plan.steps):
        launches.append(Launch(first, len(plan.steps)))
    return tuple(launches)
