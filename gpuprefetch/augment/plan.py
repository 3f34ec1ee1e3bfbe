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

from gpuprefetch.augment.column import Column, Size
from gpuprefetch.augment.steps import Step

__all__ = ["Outside", "Plan", "Resampling"]

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
