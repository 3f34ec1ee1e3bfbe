"""How are the numbers of one batch drawn?

All of them come from one ``torch.rand`` of the batch's generator, scaled in one
operation and rounded down in another where they are whole. The distributions are
Kornia's: see ``kornia.augmentation.random_generator``. Windows need more arithmetic,
and RandomResizedCrop more draws, because it takes the first of ten that fits.

The arithmetic is numpy's, on torch's memory: for a few hundred numbers its operations
cost the host a third of torch's, and never wake a pool of threads. It is done for
several batches at once where their seeds are known; how many does not change a number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpuprefetch.augment.column import Size
from gpuprefetch.augment.plan import Plan
from gpuprefetch.augment.steps import CenterCrop, Crop, ResizedCrop
from gpuprefetch.augment.values import Blur, Erase
from gpuprefetch.errors import ImageSizeError

__all__ = ["Sampler"]

_TRIES = 10  # Windows that RandomResizedCrop draws before it takes the middle one.
_PLACE = 2  # Numbers for the place of a window.
_SHAPE = 2  # And for one try at its area and aspect ratio.

_MOST_RECIPES = 64  # Sizes of batches remembered per plan; a few kilobytes each.

# A float32 product of u < 1 may round up to the whole span. Shrunk by this, it does not
# reach the next whole number for any span below 2^19.
_BELOW_ONE = 1.0 - 2.0**-20

_Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class _Windows:
    """One RandomResizedCrop or RandomErasing of a recipe."""

    step: ResizedCrop | Erase
    column: int
    """Where the pack wants left, top, width and height."""
    size: Size
    """Of the image that gets there."""

    @property
    def draws(self) -> int:
        """Uniform numbers per sample."""
        tries = 1 if isinstance(self.step, Erase) else _TRIES
        return _PLACE + _SHAPE * tries


@dataclass(frozen=True, slots=True)
class _Recipe:
    """What does not change from batch to batch of one size."""

    low: _Floats
    span: _Floats
    """Both (B, n): a column's values are ``low + u * span``. Spread over the batch:
    numpy's operations on equal shapes take a third of the time."""
    shared: npt.NDArray[np.intp] | None
    """Columns whose number the whole batch shares; None: no such."""
    windows: tuple[_Windows, ...]
    draws: int
    """Uniform numbers per batch: those of the pack, then those of each window."""


class Sampler:
    """Draws packs of a plan: (B, n), float32, in host memory, the caller's own."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._recipes: dict[tuple[int, Size], _Recipe] = {}

    def __call__(
        self,
        batch: int,
        size: Size,
        generator: torch.Generator | None,
        *,
        is_pinned: bool = False,
    ) -> Tensor:
        """Draw for ``batch`` images of one size.

        Args:
            batch: How many images.
            size: Their height and width.
            generator: On the CPU; None: torch's own.
            is_pinned: Whether the pack lies in page-locked memory, ready to be copied.
                Torch's host allocator gives that memory to the next draw only after a
                copy that it has seen; so nobody has to wait.

        Raises:
            ImageSizeError: A crop is larger than the image that reaches it.
        """
        recipe = self._recipe(batch, size)
        uniform = torch.rand(
            recipe.draws, generator=generator, dtype=torch.float32, device="cpu"
        )
        return self._scale(uniform[None], recipe, is_pinned=is_pinned)[0]

    def draw_many(
        self,
        seeds: Sequence[int],
        batch: int,
        size: Size,
        generator: torch.Generator,
        *,
        is_pinned: bool = False,
    ) -> Tensor:
        """Draw for several batches of one size, each from its own seed.

        Args:
            seeds: In [0, 2**63), one per batch.
            batch: How many images each has.
            size: Their height and width.
            generator: On the CPU; seeded anew for each batch.
            is_pinned: As for one batch.

        Returns:
            (len(seeds), B, n), float32: for each batch what ``__call__`` gives with
            ``generator.manual_seed(seed)``.

        Raises:
            ImageSizeError: A crop is larger than the image that reaches it.
        """
        recipe = self._recipe(batch, size)
        uniform = torch.empty(
            (len(seeds), recipe.draws), dtype=torch.float32, device="cpu"
        )
        for row, seed in zip(uniform.unbind(), seeds, strict=True):
            torch.rand(recipe.draws, generator=generator.manual_seed(seed), out=row)
        return self._scale(uniform, recipe, is_pinned=is_pinned)

    def _scale(self, uniform: Tensor, recipe: _Recipe, *, is_pinned: bool) -> Tensor:
        """Turn uniform numbers, (K, draws), into packs, (K, B, n)."""
        batch, width, whole = *recipe.low.shape, self.plan.whole
        many = len(uniform)
        packs = torch.empty(
            (many, batch, width),
            dtype=torch.float32,
            device="cpu",
            pin_memory=is_pinned,
        )
        out, u = packs.numpy(), uniform.numpy()
        mine = u[:, : batch * width].reshape(many, batch, width)
        if recipe.shared is not None and batch:
            mine[:, :, recipe.shared] = mine[:, :1, recipe.shared]
        np.multiply(mine, recipe.span, out=out)
        out += recipe.low
        if whole:
            np.floor(out[:, :, :whole], out=out[:, :, :whole])
        end = batch * width
        for windows in recipe.windows:
            start, end = end, end + batch * windows.draws
            if batch:
                drawn = u[:, start:end].reshape(many, windows.draws, batch)
                _place_windows(windows, drawn, out)
        return packs

    def _recipe(self, batch: int, size: Size) -> _Recipe:
        try:
            return self._recipes[batch, size]
        except KeyError:
            pass
        if len(self._recipes) >= _MOST_RECIPES:
            self._recipes.clear()
        recipe = self._recipes[batch, size] = _make_recipe(self.plan, batch, size)
        return recipe


def _make_recipe(plan: Plan, batch: int, size: Size) -> _Recipe:
    columns = plan.columns(size)
    windows = []
    for step, layout, before in plan.walk(size):
        if isinstance(step, Crop):
            _require_room(step.name, step.size, step.canvas(before))
            if step.padding_mode == "reflect":
                _require_margins(step.name, step.margins(before), before)
        elif isinstance(step, CenterCrop):
            _require_room(step.name, step.size, before)
        elif isinstance(step, Blur) and step.border in ("reflect", "circular"):
            # Reflection does not repeat the outermost pixel, so it has one fewer.
            most = (
                before if step.border == "reflect" else (before[0] + 1, before[1] + 1)
            )
            tall, wide = (side // 2 for side in step.kernel_size)
            _require_margins(step.name, (wide, wide, tall, tall), most)
        elif isinstance(step, ResizedCrop | Erase):
            windows.append(_Windows(step, layout["left"], before))
    shared = [index for index, column in enumerate(columns) if column.is_shared]
    spans = [
        (column.high - column.low) * (_BELOW_ONE if column.is_whole else 1.0)
        for column in columns
    ]
    return _Recipe(
        low=_spread([column.low for column in columns], batch),
        span=_spread(spans, batch),
        shared=np.array(shared) if shared else None,
        windows=tuple(windows),
        draws=batch * (plan.width + sum(one.draws for one in windows)),
    )


def _spread(row: Sequence[float], batch: int) -> _Floats:
    return np.array([row], dtype=np.float32).repeat(batch, axis=0)


def _require_room(name: str, window: Size, canvas: Size) -> None:
    if window[0] > canvas[0] or window[1] > canvas[1]:
        raise ImageSizeError(
            f"{name}({window[0]}, {window[1]}) is larger than the image, which is "
            f"{canvas[0]} x {canvas[1]} (height x width) there. Use a smaller crop, a "
            "Resize before it, or pad_if_needed=True."
        )


def _require_margins(name: str, margins: tuple[int, ...], size: Size) -> None:
    """Refuse a margin that would have to be folded twice; torch does so too."""
    if max(margins[:2]) >= size[1] or max(margins[2:]) >= size[0]:
        raise ImageSizeError(
            f"{name} needs {margins} pixels (left, right, top, bottom) around an image "
            f"whose border reaches {size[0] - 1} x {size[1] - 1} (height x width). Use "
            "a larger image, a Resize before it, or another border."
        )


def _place_windows(windows: _Windows, u: _Floats, packs: _Floats) -> None:
    """Choose each sample's window, and put it at a random place.

    Args:
        windows: What to draw.
        u: (K, draws, B), uniform in [0, 1).
        packs: (K, B, n); gets left, top, width and height.
    """
    step, (high, wide), column = windows.step, windows.size, windows.column
    if step.same_on_batch:
        u = u[:, :, :1]
    place_x, place_y, shapes = u[:, 0], u[:, 1], u[:, _PLACE:]
    if isinstance(step, Erase):
        width, height = _rectangles(step, windows.size, shapes[:, 0], shapes[:, 1])
    else:
        width, height = _first_that_fit(step, windows.size, shapes)
    left = np.floor((wide + 1 - width) * place_x)
    top = np.floor((high + 1 - height) * place_y)
    packs[:, :, column] = np.minimum(left, wide - width)
    packs[:, :, column + 1] = np.minimum(top, high - height)
    packs[:, :, column + 2] = width
    packs[:, :, column + 3] = height


def _rectangles(
    step: Erase, size: Size, areas: _Floats, ratios: _Floats
) -> tuple[_Floats, _Floats]:
    """Widths and heights from uniform numbers; at least a pixel, at most the image.

    Area uniform in ``scale``; ratio of height to width uniform in ``ratio``, but where
    that goes across 1, one half of the numbers stands for what lies below.
    """
    (high, wide), (low, top) = size, step.ratio
    area = (areas * (step.scale[1] - step.scale[0]) + step.scale[0]) * (high * wide)
    if low < 1.0 < top:
        below = ratios * (2.0 * (1.0 - low)) + low
        above = (ratios * 2.0 - 1.0) * (top - 1.0) + 1.0
        ratio = np.where(ratios < 0.5, below, above)
    else:
        ratio = ratios * (top - low) + low
    ratio = np.maximum(ratio, np.float32(1e-12))  # 0 is a flat line too.
    height = np.clip(np.rint(np.sqrt(area * ratio)), 1.0, high)
    return np.clip(np.rint(np.sqrt(area / ratio)), 1.0, wide), height


def _first_that_fit(
    step: ResizedCrop, size: Size, u: _Floats
) -> tuple[_Floats, _Floats]:
    """Widths and heights of the first candidate of each sample that fits.

    Failing all, it is no draw: the largest central window, which always fits
    (``ResizedCropGenerator.forward``). The other nine are computed only for those
    samples whose first does not fit, often one in ten.

    Args:
        step: What to draw.
        size: Of the image.
        u: (K, 20, B), uniform in [0, 1): area and aspect ratio of each try in turn.
    """
    width, height, fits = _candidates(step, size, u[:, 0], u[:, 1])
    if fits.all():
        return width, height
    batches, samples = np.nonzero(~fits)
    others = u[batches, :, samples]  # (failed, 20)
    more_width, more_height, fits = _candidates(
        step, size, others[:, 2::2], others[:, 3::2]
    )
    first = np.arange(len(others)), fits.argmax(1)
    last_width, last_height = _largest_window(step.ratio, size)
    has_one = fits[first]
    width[batches, samples] = np.where(has_one, more_width[first], last_width)
    height[batches, samples] = np.where(has_one, more_height[first], last_height)
    return width, height


def _candidates(
    step: ResizedCrop, size: Size, areas: _Floats, logs: _Floats
) -> tuple[_Floats, _Floats, npt.NDArray[np.bool_]]:
    """Widths and heights from uniform numbers, and which fit into the image.

    Area uniform in ``scale``, log of width / height uniform in ``ratio``; width and
    height are ``sqrt(area * ratio)`` and ``sqrt(area / ratio)``, rounded.
    """
    high, wide = size
    small, large = (share * high * wide for share in step.scale)
    narrow, broad = (math.log(ratio) / 2 for ratio in step.ratio)
    roots = np.sqrt(areas * (large - small) + small)
    stretch = np.exp(logs * (broad - narrow) + narrow)
    width, height = np.rint(roots * stretch), np.rint(roots / stretch)
    # An area of at least 0 gives sides of at least 0; a product of 0 is no window.
    return width, height, (width <= wide) & (height <= high) & (width * height > 0)


def _largest_window(ratio: tuple[float, float], size: Size) -> tuple[int, int]:
    """Width and height of the largest window whose aspect ratio is allowed."""
    height, width = size
    if width / height < min(ratio):
        return width, min(max(round(width / min(ratio)), 1), height)
    if width / height > max(ratio):
        return min(max(round(height * max(ratio)), 1), width), height
    return width, height
