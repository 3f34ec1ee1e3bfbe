"""What can one member of an augmentation chain do to an image, as plain data?

Here are the steps that move pixels; :mod:`gpuprefetch.augment.values` has the others.
A step knows its settings, the size of the image that it returns, and which numbers have
to be drawn per sample for it (its *columns*). :mod:`gpuprefetch.augment.plan` puts
steps in a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from gpuprefetch.augment.column import Column, Size, skip_column
from gpuprefetch.augment.values import ValueStep

__all__ = [
    "Affine",
    "Border",
    "CenterCrop",
    "Crop",
    "Flip",
    "Geometric",
    "Interpolation",
    "Resize",
    "ResizedCrop",
    "Rotation",
    "Step",
]

Interpolation = Literal["bilinear", "round", "exact"]
"""How a value between pixels is read: linear; the nearest pixel as ``grid_sample``
chooses it (ties to even); the nearest as ``interpolate(mode="nearest-exact")`` does."""

Border = Literal["zeros", "border", "reflection", "fill"]
"""What lies outside of the frame for a warp; the names are ``grid_sample``'s."""


@dataclass(frozen=True, slots=True)
class Crop:
    """A window of fixed size at a random place, possibly on a padded canvas."""

    name: str
    size: Size
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    """Pixels added left, right, top, bottom before the crop."""
    pad_if_needed: bool = False
    padding_mode: Literal["constant", "reflect", "replicate"] = "constant"
    fill: tuple[float, ...] = (0.0,)
    """Value of constant padding: one for all channels, or one per channel."""
    same_on_batch: bool = False

    def margins(self, size: Size) -> tuple[int, int, int, int]:
        """Padding (left, right, top, bottom) of an image of this size."""
        left, right, top, bottom = self.padding
        if self.pad_if_needed:
            missing_y = max(self.size[0] - size[0], 0)
            missing_x = max(self.size[1] - size[1], 0)
            left, right = max(left, missing_x), max(right, missing_x)
            top, bottom = max(top, missing_y), max(bottom, missing_y)
        return left, right, top, bottom

    def canvas(self, size: Size) -> Size:
        """Size of the padded image."""
        left, right, top, bottom = self.margins(size)
        return size[0] + top + bottom, size[1] + left + right

    def output_size(self, size: Size) -> Size:
        """The window's size, whatever comes in."""
        return self.size

    def columns(self, size: Size) -> tuple[Column, ...]:
        """Left and top edge of the window on the padded canvas, whole pixels."""
        height, width = self.canvas(size)
        room_x = float(max(width - self.size[1], 0) + 1)
        room_y = float(max(height - self.size[0], 0) + 1)
        return (
            Column("left", 0.0, room_x, is_whole=True, is_shared=self.same_on_batch),
            Column("top", 0.0, room_y, is_whole=True, is_shared=self.same_on_batch),
        )


@dataclass(frozen=True, slots=True)
class CenterCrop:
    """The window in the middle; its edges are rounded down to whole pixels."""

    name: str
    size: Size

    def origin(self, size: Size) -> tuple[int, int]:
        """Left and top edge of the window."""
        return (size[1] - self.size[1]) // 2, (size[0] - self.size[0]) // 2

    def output_size(self, size: Size) -> Size:
        """The window's size, whatever comes in."""
        return self.size

    def columns(self, size: Size) -> tuple[Column, ...]:
        """Nothing is drawn."""
        return ()


@dataclass(frozen=True, slots=True)
class ResizedCrop:
    """A window of random area and aspect ratio, resized to a fixed size."""

    name: str
    size: Size
    scale: tuple[float, float]
    """Range of the window's share of the image's area."""
    ratio: tuple[float, float]
    """Range of width over height; its logarithm is uniform."""
    interpolation: Interpolation = "bilinear"
    align_corners: bool = True
    is_warped: bool = False
    """Kornia's ``cropping_mode="resample"``: masks are read as ``grid_sample`` does."""
    same_on_batch: bool = False

    def output_size(self, size: Size) -> Size:
        """The size asked for."""
        return self.size

    def columns(self, size: Size) -> tuple[Column, ...]:
        """The window in whole pixels; its numbers are not uniform, see ``sample``."""
        return tuple(
            Column(name, 0.0, 0.0, is_whole=True, is_shared=self.same_on_batch)
            for name in ("left", "top", "width", "height")
        )


@dataclass(frozen=True, slots=True)
class Resize:
    """The whole image at another size."""

    name: str
    size: Size | int
    side: str = "short"
    """Which side an integer size names: short, long, vert or horz."""
    interpolation: Interpolation = "bilinear"
    align_corners: bool = True

    def output_size(self, size: Size) -> Size:
        """The size asked for; one side given, the other keeps the aspect ratio."""
        if not isinstance(self.size, int):
            return self.size
        ratio = size[1] / size[0]
        if self.side == "vert":
            names_height = True
        elif self.side == "horz":
            names_height = False
        else:
            names_height = (self.side == "short") ^ (ratio < 1.0)
        if names_height:
            return self.size, int(self.size * ratio)
        return int(self.size / ratio), self.size

    def columns(self, size: Size) -> tuple[Column, ...]:
        """Nothing is drawn."""
        return ()


@dataclass(frozen=True, slots=True)
class Flip:
    """Mirror along x (left and right change places) or y."""

    name: str
    axis: Literal["x", "y"]
    p: float = 0.5
    same_on_batch: bool = False

    def output_size(self, size: Size) -> Size:
        """Unchanged."""
        return size

    def columns(self, size: Size) -> tuple[Column, ...]:
        """Only whether to skip it."""
        return skip_column(self.p, is_shared=self.same_on_batch)


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotation about the centre; positive degrees turn counter-clockwise as shown."""

    name: str
    degrees: tuple[float, float]
    interpolation: Interpolation = "bilinear"
    p: float = 0.5
    same_on_batch: bool = False

    def output_size(self, size: Size) -> Size:
        """Unchanged."""
        return size

    def columns(self, size: Size) -> tuple[Column, ...]:
        """The angle in degrees."""
        low, high = self.degrees
        angle = Column("degrees", low, high, is_shared=self.same_on_batch)
        return (angle, *skip_column(self.p, is_shared=self.same_on_batch))


@dataclass(frozen=True, slots=True)
class Affine:
    """Shear, then scale and clockwise rotation about the centre, then shift."""

    name: str
    degrees: tuple[float, float]
    translate: tuple[float, float] | None = None
    """Greatest shift as a share of width and height."""
    scale: tuple[float, float] | tuple[float, float, float, float] | None = None
    """Range of both factors, or of x's and then of y's."""
    shear: tuple[float, float, float, float] | None = None
    """Ranges in degrees: x low, x high, y low, y high."""
    interpolation: Interpolation = "bilinear"
    border: Border = "zeros"
    align_corners: bool = False
    fill: tuple[float, ...] = (0.0,)
    p: float = 0.5
    same_on_batch: bool = False

    def output_size(self, size: Size) -> Size:
        """Unchanged."""
        return size

    def columns(self, size: Size) -> tuple[Column, ...]:
        """Degrees; where asked for: shift in pixels, factors, shear in degrees."""
        ranges: list[tuple[str, float, float]] = [("degrees", *self.degrees)]
        if self.translate is not None:
            reach_x = self.translate[0] * size[1]
            reach_y = self.translate[1] * size[0]
            ranges += [("shift_x", -reach_x, reach_x), ("shift_y", -reach_y, reach_y)]
        if self.scale is not None:
            ranges.append(("scale_x", self.scale[0], self.scale[1]))
            if len(self.scale) == 4:
                ranges.append(("scale_y", self.scale[2], self.scale[3]))
        if self.shear is not None:
            ranges.append(("shear_x", self.shear[0], self.shear[1]))
            ranges.append(("shear_y", self.shear[2], self.shear[3]))
        drawn = (
            Column(name, low, high, is_shared=self.same_on_batch)
            for name, low, high in ranges
        )
        return (*drawn, *skip_column(self.p, is_shared=self.same_on_batch))


Geometric: TypeAlias = (
    Crop | CenterCrop | ResizedCrop | Resize | Flip | Rotation | Affine
)
"""Steps that move pixels; labels follow them."""

Step: TypeAlias = Geometric | ValueStep
