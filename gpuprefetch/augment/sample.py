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

from gpuprefetch.augment.plan import (
    CenterCrop,
    Column,
    Crop,
    Plan,
    ResizedCrop,
    Size,
)
from gpuprefetch.errors import ImageSizeError

__all__ = ["Sampler"]

_TRIES = 10  # Windows that RandomResizedCrop draws before it takes the middle one.


@dataclass(frozen=True, slots=True)
class _Windows:
    """One RandomResizedCrop of a recipe."""

    column: int
    """Where the pack wants left, top, width and height."""
    start: int
    """Where its own numbers begin: areas, logs of aspect ratios, places."""
    limit: Tensor
    """Width and height of the image, (2, 1, 1)."""


@dataclass(frozen=True, slots=True)
class _Recipe:
    """What does not change from batch to batch for images of one size."""

    low: Tensor
    span: Tensor
    """Both (n,), float32: a column's values are ``low + u * span``."""
    shared: Tensor | None
    """Columns whose number the whole batch shares; None: no such."""
    is_all_shared: bool
    windows: tuple[_Windows, ...]
    drawn: int
    """Uniform numbers per sample: the pack's, then those that windows are made of."""


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
        pack = torch.addcmul(recipe.low, u, recipe.span)
        if self.plan.whole:
            pack[:, : self.plan.whole].floor_()
        for windows in recipe.windows:
            _place_windows(windows, pack)
        if recipe.windows:
            pack = pack[:, : self.plan.width].contiguous()
        return pack if rows == batch else pack.expand(batch, -1).contiguous()


def _make_recipe(plan: Plan, size: Size) -> _Recipe:
    columns = list(plan.columns(size))
    windows = []
    for step, layout, before in plan.walk(size):
        if isinstance(step, Crop):
            _require_room(step.name, step.size, step.canvas(before))
        elif isinstance(step, CenterCrop):
            _require_room(step.name, step.size, before)
        elif isinstance(step, ResizedCrop):
            limit = torch.tensor([before[1], before[0]], dtype=torch.float32)
            start = len(columns)
            windows.append(_Windows(layout["left"], start, limit.view(2, 1, 1)))
            columns += _window_columns(step, before)
    shared = [index for index, column in enumerate(columns) if column.is_shared]
    is_all_shared = len(shared) == len(columns) and len(columns) > 0
    return _Recipe(
        low=torch.tensor([column.low for column in columns]),
        span=torch.tensor([column.high - column.low for column in columns]),
        shared=torch.tensor(shared) if shared and not is_all_shared else None,
        is_all_shared=is_all_shared,
        windows=tuple(windows),
        drawn=len(columns),
    )


def _require_room(name: str, window: Size, canvas: Size) -> None:
    if window[0] > canvas[0] or window[1] > canvas[1]:
        raise ImageSizeError(
            f"{name} cuts {window[0]} x {window[1]} pixels (height x width), but the "
            f"image that reaches it has {canvas[0]} x {canvas[1]}. Make the crop "
            "smaller, resize before it, or pass pad_if_needed=True."
        )


def _window_columns(step: ResizedCrop, size: Size) -> list[Column]:
    """Ten candidates and the way out: areas, logs of aspect ratios, then the place.

    Area uniform in ``scale``, log of width / height uniform in ``ratio``. The eleventh
    candidate is no draw: the largest central window, which always fits
    (``ResizedCropGenerator.forward``).
    """
    pixels = size[0] * size[1]
    small, large = (share * pixels for share in step.scale)
    narrow, wide = (math.log(ratio) for ratio in step.ratio)
    width, height = _largest_window(step.ratio, size)
    last_area, last_log = width * height, math.log(width / height)
    shared = step.same_on_batch
    return [
        *(Column("area", small, large, is_shared=shared) for _ in range(_TRIES)),
        Column("area", last_area, last_area, is_shared=shared),
        *(Column("log ratio", narrow, wide, is_shared=shared) for _ in range(_TRIES)),
        Column("log ratio", last_log, last_log, is_shared=shared),
        Column("place x", 0.0, 1.0, is_shared=shared),
        Column("place y", 0.0, 1.0, is_shared=shared),
    ]


# Half the log of the aspect ratio, plus for the width and minus for the height.
_HALVES = torch.tensor([0.5, -0.5]).view(2, 1, 1)


def _place_windows(windows: _Windows, pack: Tensor) -> None:
    """Take each sample's first candidate that fits, and put it at a random place.

    Width and height are ``sqrt(area * ratio)`` and ``sqrt(area / ratio)``, rounded.
    """
    start, count = windows.start, _TRIES + 1
    areas = pack[:, start : start + count]
    logs = pack[:, start + count : start + 2 * count]
    sizes = logs.mul(_HALVES).exp_().mul_(areas.sqrt()).round_()  # (2, B, 11)
    fits = ((sizes <= windows.limit) & (sizes > 0)).all(0)
    first = fits.to(torch.uint8).argmax(1).expand(2, -1)[..., None]
    chosen = sizes.gather(2, first)  # (2, B, 1)
    room = (windows.limit + 1 - chosen).squeeze(2).t()
    places = pack[:, start + 2 * count : start + 2 * count + 2]
    column = windows.column
    pack[:, column : column + 2] = room.mul_(places).floor_()
    pack[:, column + 2 : column + 4] = chosen.squeeze(2).t()


def _largest_window(ratio: tuple[float, float], size: Size) -> tuple[int, int]:
    """Width and height of the largest window whose aspect ratio is allowed."""
    height, width = size
    if width / height < min(ratio):
        return width, min(max(round(width / min(ratio)), 1), height)
    if width / height > max(ratio):
        return min(max(round(height * max(ratio)), 1), width), height
    return width, height
