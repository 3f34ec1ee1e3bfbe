"""What can a member do to the values of an image, as plain data?

These steps leave the pixels in their places. A blur mixes neighbours; the others look
at one pixel at a time, some at all of its channels, and an erasing at its place too.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from gpuprefetch.augment.column import Column, Size, skip_column
from gpuprefetch.errors import TransformError

__all__ = [
    "Blur",
    "Erase",
    "Grayscale",
    "Jitter",
    "Pointwise",
    "ValueStep",
    "luma_of",
    "per_channel",
]

_ADJUSTMENTS = ("brightness", "contrast", "saturation", "hue")


def per_channel(values: Sequence[float], channels: int) -> tuple[float, ...]:
    """A step's values for each channel, from one for all or one for each.

    Raises:
        TransformError: They are neither.
    """
    if len(values) not in (1, channels):
        raise TransformError(
            f"{len(values)} values, such as a mean, were given for images with "
            f"{channels} channels; one for all or one for each fits."
        )
    return tuple(values) * (channels // len(values))


@dataclass(frozen=True, slots=True)
class Blur:
    """Separable Gaussian blur with each sample's own sigma."""

    name: str
    kernel_size: Size
    sigma: tuple[float, float]
    """Range of the standard deviation in pixels."""
    border: Literal["constant", "reflect", "replicate", "circular"] = "reflect"
    p: float = 0.5
    same_on_batch: bool = False

    def output_size(self, size: Size) -> Size:
        """Unchanged."""
        return size

    def columns(self, size: Size) -> tuple[Column, ...]:
        """The standard deviation in pixels."""
        sigma = Column("sigma", *self.sigma, is_shared=self.same_on_batch)
        return (sigma, *skip_column(self.p, is_shared=self.same_on_batch))


@dataclass(frozen=True, slots=True)
class Pointwise:
    """``value * scale + bias`` per channel: Normalize and Denormalize."""

    name: str
    scale: tuple[float, ...]
    """One factor for all channels, or one per channel."""
    bias: tuple[float, ...]
    p: float = 1.0
    """Probability for the whole batch."""

    def output_size(self, size: Size) -> Size:
        """Unchanged."""
        return size

    def columns(self, size: Size) -> tuple[Column, ...]:
        """Only whether to skip it, the same for the whole batch."""
        return skip_column(self.p, is_shared=True)


@dataclass(frozen=True, slots=True)
class Jitter:
    """Brightness, contrast, saturation and hue: ColorJitter and ColorJiggle.

    A range is None where the factor never changes anything.
    """

    name: str
    brightness: tuple[float, float] | None = None
    contrast: tuple[float, float] | None = None
    saturation: tuple[float, float] | None = None
    hue: tuple[float, float] | None = None
    """In turns around the circle of colors."""
    is_jiggle: bool = False
    """ColorJiggle: brightness adds, contrast multiplies, saturation is that of HSV.
    ColorJitter: brightness multiplies; contrast blends with the image's mean grey,
    saturation with the pixel's grey."""
    order: tuple[int, ...] | None = None
    """Which adjustments, in which order: brightness (0), contrast, saturation and hue
    (3). None: all, in an order drawn per batch."""
    p: float = 1.0
    same_on_batch: bool = False
    ORDERS: ClassVar[tuple[tuple[int, ...], ...]] = tuple(
        itertools.permutations(range(4))
    )
    """The orders that can be drawn."""

    def output_size(self, size: Size) -> Size:
        """Unchanged."""
        return size

    @property
    def adjustments(self) -> tuple[int, ...]:
        """Which of the four are made, in a fixed order if there is one."""
        order = self.ORDERS[0] if self.order is None else self.order
        return tuple(index for index in order if self._ranges[index] is not None)

    @property
    def is_order_drawn(self) -> bool:
        """Whether the batch draws an order that makes a difference."""
        return self.order is None and len(self.adjustments) > 1

    @property
    def needs_mean(self) -> bool:
        """Whether the whole image's mean has to be known."""
        return not self.is_jiggle and 1 in self.adjustments

    def columns(self, size: Size) -> tuple[Column, ...]:
        """The order, an index of ``ORDERS``, for the batch; a factor per adjustment."""
        drawn = [
            Column(_ADJUSTMENTS[index], *span, is_shared=self.same_on_batch)
            for index, span in enumerate(self._ranges)
            if span is not None and index in self.adjustments
        ]
        if self.is_order_drawn:
            last = float(len(self.ORDERS))
            drawn.insert(0, Column("order", 0.0, last, is_whole=True, is_shared=True))
        return (*drawn, *skip_column(self.p, is_shared=self.same_on_batch))

    @property
    def _ranges(self) -> tuple[tuple[float, float] | None, ...]:
        return self.brightness, self.contrast, self.saturation, self.hue

    def adjustments_for(self, channels: int) -> tuple[int, ...]:
        """Those of :attr:`adjustments` that change an image of so many channels.

        Raises:
            TransformError: Saturation or hue of an image that is not RGB.
        """
        if channels == 3:
            return self.adjustments
        if channels == 1 and not self.is_jiggle and 3 not in self.adjustments:
            return tuple(index for index in self.adjustments if index != 2)
        if 2 in self.adjustments or 3 in self.adjustments:
            raise TransformError(
                f"{self.name} changes saturation or hue, which takes RGB images; these "
                f"have {channels} channels. Pass saturation=0 and hue=0 for them."
            )
        return self.adjustments


@dataclass(frozen=True, slots=True)
class Grayscale:
    """Every channel becomes the weighted sum of all."""

    name: str
    weights: tuple[float, ...] = ()
    """One per channel; empty: those of luma for RGB, else equal ones."""
    p: float = 0.1
    same_on_batch: bool = False

    def weights_for(self, channels: int) -> tuple[float, ...]:
        """The weights for an image of so many channels.

        Raises:
            TransformError: The step has weights for another number of channels.
        """
        weights = self.weights or luma_of(channels)
        if len(weights) != channels:
            raise TransformError(
                f"{self.name} has {len(weights)} rgb_weights for images with "
                f"{channels} channels; give one for each."
            )
        return weights

    def output_size(self, size: Size) -> Size:
        """Unchanged."""
        return size

    def columns(self, size: Size) -> tuple[Column, ...]:
        """Only whether to skip it."""
        return skip_column(self.p, is_shared=self.same_on_batch)


def luma_of(channels: int) -> tuple[float, ...]:
    """Weights of the grey value of a pixel: those of luma for RGB, else the mean's."""
    return (0.299, 0.587, 0.114) if channels == 3 else (1.0 / channels,) * channels


@dataclass(frozen=True, slots=True)
class Erase:
    """A rectangle of random area, aspect ratio and place gets one value."""

    name: str
    scale: tuple[float, float]
    """Range of the rectangle's share of the image's area."""
    ratio: tuple[float, float]
    """Range of height over width. One that goes across 1 is uniform on either side of
    it, with the same probability for both."""
    value: float = 0.0
    p: float = 0.5
    same_on_batch: bool = False

    def output_size(self, size: Size) -> Size:
        """Unchanged."""
        return size

    def columns(self, size: Size) -> tuple[Column, ...]:
        """The rectangle in whole pixels, which is not uniform (see ``sample``)."""
        rectangle = tuple(
            Column(name, 0.0, 0.0, is_whole=True, is_shared=self.same_on_batch)
            for name in ("left", "top", "width", "height")
        )
        value = Column("value", self.value, self.value)
        return (
            *rectangle,
            value,
            *skip_column(self.p, is_shared=self.same_on_batch),
        )


ValueStep: TypeAlias = Blur | Pointwise | Jitter | Grayscale | Erase
"""Steps that leave the pixels in their places."""
