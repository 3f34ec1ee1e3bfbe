"""How are the numbers of one batch drawn?

All of them come from one ``torch.rand`` of the caller's generator, scaled in one
operation and rounded down in another where they are whole. The distributions are
Kornia's: see ``kornia.augmentation.random_generator``. Only RandomResizedCrop needs
more, because it draws ten windows and takes the first that fits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gpuprefetch.augment.plan import CenterCrop, Crop, Plan, ResizedCrop, Size
from gpuprefetch.errors import ImageSizeError

__all__ = ["Sampler"]

_TRIES = 10  # Windows that RandomResizedCrop draws before it takes the middle one.


@dataclass(frozen=True, slots=True)
class _Recipe:
    """What does not change from batch to batch for images of one size."""

    low: Tensor
    span: Tensor
    """Both (n,), float32: a column's values are ``low + u * span``."""
    shared: Tensor | None
    """Columns of the uniform numbers that the whole batch shares; None: no such."""
    is_all_shared: bool
    windows: tuple[tuple[ResizedCrop, int, int, Size], ...]
    """Per RandomResizedCrop: its first column, first uniform column, image size."""
    drawn: int
    """Uniform numbers per sample."""


class Sampler:
    """Draws the pack of a plan: (B, n), float32, in host memory, the caller's own."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._recipes: dict[Size, _Recipe] = {}

    def __call__(
        self, batch: int, size: Size, generator: torch.Generator | None
    ) -> Tensor:
        """Draw for ``batch`` images of one size.

        Raises:
            ImageSizeError: A crop is larger than the image that reaches it.
        """
        recipe = self._recipes.get(size)
        if recipe is None:
            recipe = self._recipes[size] = _make_recipe(self.plan, size)
        rows = min(batch, 1) if recipe.is_all_shared else batch
        u = torch.rand(rows, recipe.drawn, generator=generator)
        if recipe.shared is not None and batch > 0:
            u[:, recipe.shared] = u[0, recipe.shared]
        width = self.plan.width
        scaled = u[:, :width] if recipe.drawn != width else u
        pack = torch.addcmul(recipe.low, scaled, recipe.span)
        if self.plan.whole:
            pack[:, : self.plan.whole].floor_()
        for step, column, start, before in recipe.windows:
            tries = u[:, start : start + 2 * _TRIES + 2]
            pack[:, column : column + 4] = _draw_windows(step, tries, before)
        return pack if rows == batch else pack.expand(batch, -1).contiguous()


def _make_recipe(plan: Plan, size: Size) -> _Recipe:
    columns = plan.columns(size)
    shared = [index for index, column in enumerate(columns) if column.is_shared]
    windows = []
    drawn = len(columns)
    for step, layout, before in plan.walk(size):
        if isinstance(step, Crop):
            _require_room(step.name, step.size, step.canvas(before))
        elif isinstance(step, CenterCrop):
            _require_room(step.name, step.size, before)
        elif isinstance(step, ResizedCrop):
            windows.append((step, layout["left"], drawn, before))
            if step.same_on_batch:
                shared += range(drawn, drawn + 2 * _TRIES + 2)
            drawn += 2 * _TRIES + 2
    is_all_shared = len(shared) == drawn and drawn > 0
    return _Recipe(
        low=torch.tensor([column.low for column in columns]),
        span=torch.tensor([column.high - column.low for column in columns]),
        shared=torch.tensor(shared) if shared and not is_all_shared else None,
        is_all_shared=is_all_shared,
        windows=tuple(windows),
        drawn=drawn,
    )


def _require_room(name: str, window: Size, canvas: Size) -> None:
    if window[0] > canvas[0] or window[1] > canvas[1]:
        raise ImageSizeError(
            f"{name} cuts {window[0]} x {window[1]} pixels (height x width), but the "
            f"image that reaches it has {canvas[0]} x {canvas[1]}. Make the crop "
            "smaller, resize before it, or pass pad_if_needed=True."
        )


def _draw_windows(step: ResizedCrop, u: Tensor, size: Size) -> Tensor:
    """Windows (left, top, width, height) in whole pixels, (B, 4).

    Area uniform in ``scale``, log of the aspect ratio uniform in ``ratio``; the first
    of ten candidates that fits into the image, else the largest central one
    (``ResizedCropGenerator.forward``). The place is uniform over all that fit.
    """
    height, width = size
    (small, large), (narrow, wide) = step.scale, step.ratio
    area = u[:, :_TRIES].mul(large - small).add_(small).mul_(height * width)
    aspect = u[:, _TRIES : 2 * _TRIES].mul(math.log(wide) - math.log(narrow))
    aspect = aspect.add_(math.log(narrow)).exp_()
    widths = (area * aspect).sqrt_().round_()
    heights = area.div_(aspect).sqrt_().round_()
    fits = (widths <= width) & (heights <= height) & (widths > 0) & (heights > 0)
    found, first = fits.to(torch.int8).max(1, keepdim=True)
    fallback_width, fallback_height = _largest_window(step.ratio, size)
    missing = found == 0
    chosen_width = widths.gather(1, first).masked_fill_(missing, fallback_width)
    chosen_height = heights.gather(1, first).masked_fill_(missing, fallback_height)
    left = (width + 1 - chosen_width).mul_(u[:, -2:-1]).floor_()
    top = (height + 1 - chosen_height).mul_(u[:, -1:]).floor_()
    return torch.cat((left, top, chosen_width, chosen_height), 1)


def _largest_window(ratio: tuple[float, float], size: Size) -> tuple[float, float]:
    """Width and height of the largest window whose aspect ratio is allowed."""
    height, width = size
    if width / height < min(ratio):
        return width, min(max(round(width / min(ratio)), 1), height)
    if width / height > max(ratio):
        return min(max(round(height * max(ratio)), 1), width), height
    return width, height
