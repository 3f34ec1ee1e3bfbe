"""How are the numbers of one batch drawn?

All of them come from one ``torch.rand`` of the caller's generator, scaled in one
operation and rounded down in another where they are whole. The distributions are
Kornia's: see ``kornia.augmentation.random_generator``. Only RandomResizedCrop needs
more, because it draws ten windows and takes the first that fits.

The arithmetic is numpy's, on torch's memory: for a few hundred numbers its operations
cost the host a third of torch's, and never wake a pool of threads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpuprefetch.augment.plan import Plan
from gpuprefetch.augment.steps import CenterCrop, Crop, ResizedCrop, Size
from gpuprefetch.errors import ImageSizeError

__all__ = ["Sampler"]

_TRIES = 10  # Windows that RandomResizedCrop draws before it takes the middle one.
_PER_WINDOW = 4  # Area and log of the aspect ratio of the first try; the place.

_MOST_RECIPES = 64  # Sizes of batches remembered per plan; a few kilobytes each.

# A float32 product of u < 1 may round up to the whole span. Shrunk by this, it does not
# reach the next whole number for any span below 2^19.
_BELOW_ONE = 1.0 - 2.0**-20

_Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class _Windows:
    """One RandomResizedCrop of a recipe."""

    step: ResizedCrop
    column: int
    """Where the pack wants left, top, width and height."""
    size: Size
    """Of the image that gets there."""


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


class Sampler:
    """Draws the pack of a plan: (B, n), float32, in host memory, the caller's own."""

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
        width, whole = self.plan.width, self.plan.whole
        # The windows' numbers lie in rows behind those of the pack.
        drawn = torch.rand(
            (batch, width)
            if not recipe.windows
            else batch * (width + _PER_WINDOW * len(recipe.windows)),
            generator=generator,
            dtype=torch.float32,
            device="cpu",
            pin_memory=is_pinned,
        )
        end = batch * width
        flat = drawn.numpy().reshape(-1)
        pack = flat[:end].reshape(batch, width)
        if recipe.shared is not None and batch:
            pack[:, recipe.shared] = pack[0, recipe.shared]
        pack *= recipe.span
        pack += recipe.low
        if whole:
            np.floor(pack[:, :whole], out=pack[:, :whole])
        if not recipe.windows:
            return drawn
        for windows in recipe.windows:
            start, end = end, end + batch * _PER_WINDOW
            u = flat[start:end].reshape(_PER_WINDOW, batch)
            _place_windows(windows, u, pack, generator)
        return drawn[: batch * width].view(batch, width)

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
        elif isinstance(step, CenterCrop):
            _require_room(step.name, step.size, before)
        elif isinstance(step, ResizedCrop):
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


def _place_windows(
    windows: _Windows, u: _Floats, pack: _Floats, generator: torch.Generator | None
) -> None:
    """Take each sample's first candidate that fits, and put it at a random place.

    Args:
        windows: What to draw.
        u: (_PER_WINDOW, B), uniform in [0, 1).
        pack: Gets left, top, width and height.
        generator: For samples whose first candidate does not fit, often one in ten.
    """
    step, (high, wide), column = windows.step, windows.size, windows.column
    if not u.shape[1]:
        return
    if step.same_on_batch:
        u = u[:, :1]
    width, height, fits = _candidates(windows, u[0], u[1])
    if not fits.all():
        rest = np.flatnonzero(~fits)
        width[rest], height[rest] = _try_again(windows, len(rest), generator)
    left, top = (
        np.floor((wide + 1 - width) * u[2]),
        np.floor((high + 1 - height) * u[3]),
    )
    pack[:, column] = np.minimum(left, wide - width)
    pack[:, column + 1] = np.minimum(top, high - height)
    pack[:, column + 2] = width
    pack[:, column + 3] = height


def _candidates(
    windows: _Windows, areas: _Floats, logs: _Floats
) -> tuple[_Floats, _Floats, npt.NDArray[np.bool_]]:
    """Widths and heights from uniform numbers, and which fit into the image.

    Area uniform in ``scale``, log of width / height uniform in ``ratio``; width and
    height are ``sqrt(area * ratio)`` and ``sqrt(area / ratio)``, rounded.
    """
    step, (high, wide) = windows.step, windows.size
    small, large = (share * high * wide for share in step.scale)
    narrow, broad = (math.log(ratio) / 2 for ratio in step.ratio)
    roots = np.sqrt(areas * (large - small) + small)
    stretch = np.exp(logs * (broad - narrow) + narrow)
    width, height = np.rint(roots * stretch), np.rint(roots / stretch)
    # An area of at least 0 gives sides of at least 0; a product of 0 is no window.
    return width, height, (width <= wide) & (height <= high) & (width * height > 0)


def _try_again(
    windows: _Windows, count: int, generator: torch.Generator | None
) -> tuple[_Floats, _Floats]:
    """The other nine candidates of some samples; failing those, the middle one.

    That one is no draw: the largest central window, which always fits
    (``ResizedCropGenerator.forward``).
    """
    shape = (2, _TRIES - 1, count)
    u = torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu")
    width, height, fits = _candidates(windows, *u.numpy())
    first = fits.argmax(0), np.arange(count)
    last_width, last_height = _largest_window(windows.step.ratio, windows.size)
    return (
        np.where(fits[first], width[first], np.float32(last_width)),
        np.where(fits[first], height[first], np.float32(last_height)),
    )


def _largest_window(ratio: tuple[float, float], size: Size) -> tuple[int, int]:
    """Width and height of the largest window whose aspect ratio is allowed."""
    height, width = size
    if width / height < min(ratio):
        return width, min(max(round(width / min(ratio)), 1), height)
    if width / height > max(ratio):
        return min(max(round(height * max(ratio)), 1), width), height
    return width, height
