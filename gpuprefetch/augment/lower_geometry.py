"""How are the geometric steps of a launch said in constants of the kernel?"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gpuprefetch.augment.column import Size
from gpuprefetch.augment.lower_values import channel_values, table
from gpuprefetch.augment.steps import (
    Affine,
    CenterCrop,
    Crop,
    Flip,
    Geometric,
    Interpolation,
    Resize,
    ResizedCrop,
    Rotation,
)
from gpuprefetch.augment.variant import Pixel, Tile, Variant

__all__ = ["MARGINS", "GeometryLowering"]

_FULL_SCALE: Mapping[Pixel, float] = {"u8": 255.0, "u16": 65535.0}
_INTERPOLATION: Mapping[Interpolation, str] = {
    "bilinear": "BILINEAR",
    "round": "ROUND",
    "exact": "EXACT",
}
MARGINS = {
    "constant": "MARGIN_CONSTANT",
    "reflect": "MARGIN_REFLECT",
    "replicate": "MARGIN_REPLICATE",
    "circular": "MARGIN_CIRCULAR",
}
"""What the kernel calls that which lies beyond a frame, by the names of torch."""

_Placed = tuple[Geometric, Mapping[str, int]]  # A step, and its numbers' columns.


@dataclass(slots=True)
class GeometryLowering:
    """What has been said so far of the geometry of one launch.

    Args:
        variant: Types and layout of the images.
        is_composed: The warps are multiplied to one, and the source is read once.
    """

    variant: Variant
    is_composed: bool
    calls: list[str] = field(default_factory=list)
    """Of the kernel's ``Builder``, one or more for each step."""
    kinds: list[str] = field(default_factory=list)
    """Of each frame that is resampled, how it is read."""
    fills: list[tuple[float, ...]] = field(default_factory=list)
    """Colors for what lies outside, a value per channel."""
    padding: str = "MARGIN_NONE"
    """What the canvas around the source shows."""
    padding_fill: int = 0
    """Place in ``fills`` of its color."""
    interpolations: list[Interpolation] = field(default_factory=list)
    """Of each frame that is resampled."""

    @staticmethod
    def of(placed: Sequence[_Placed], variant: Variant) -> GeometryLowering:
        """Say all geometric steps of a launch."""
        warps = [s for s, _ in placed if not isinstance(s, Crop | CenterCrop | Flip)]
        is_composed = variant.resampling == "single" and (
            len(warps) > 1 or (bool(warps) and variant.outside == "extend")
        )
        low = GeometryLowering(variant, is_composed)
        for step, columns in placed:
            _lower(low, step, columns)
        return low

    @property
    def unit(self) -> float:
        """What 1.0 is in the source's numbers."""
        return _FULL_SCALE.get(self.variant.source, 1.0)

    def fill(self, values: Sequence[float]) -> int:
        """Keep a color for what lies outside; gives its number."""
        self.fills.append(channel_values(values, self.variant.channels, self.unit))
        return len(self.fills) - 1

    def level(
        self,
        interpolation: Interpolation,
        border: str,
        *,
        is_aligned: bool,
        fill: int = 0,
    ) -> int:
        """Keep one frame that is resampled; gives its number."""
        self.interpolations.append(interpolation)
        aligned = "true" if is_aligned else "false"
        how = _INTERPOLATION[interpolation]
        self.kinds.append(f"{{{how}, {border}, {aligned}, {fill}}}")
        return len(self.kinds) - 1

    def defines(self, tile: Tile) -> dict[str, object]:
        """The constants, by name."""
        kinds, single_read = self.kinds, "BILINEAR"
        is_extended = self.is_composed and self.variant.outside == "extend"
        if self.is_composed and "bilinear" not in self.interpolations:
            single_read = "ROUND"
        if is_extended:
            kinds = [f"{{{single_read}, ZEROS, false, 0}}"] * len(kinds)
        is_interpolated = any("BILINEAR" in kind for kind in kinds)
        fills = self.fills or [(0.0,) * self.variant.channels]
        return {
            "STAGE_16": int(self._can_stage_16(fills) and not tile.stages_floats),
            "PLAN_STAGE_TEXELS": tile.stage_texels if is_interpolated else 0,
            "PLAN_LEVELS": len(kinds),
            "PLAN_KINDS": ", ".join(kinds) or "{BILINEAR, ZEROS, true, 0}",
            "PLAN_SINGLE": _bool(self.is_composed and not is_extended),
            "PLAN_EXTENDED": _bool(is_extended),
            "PLAN_TOP_VIEW": _bool(self.interpolations[-1:] == ["exact"]),
            "PLAN_SINGLE_READ": single_read,
            "PLAN_PADDING": self.padding,
            "PLAN_PADDING_FILL": self.padding_fill,
            "PLAN_FILLS": table(fills, self.variant.channels),
            "PLAN_STEPS": " ".join(self.calls),
        }

    def _can_stage_16(self, fills: Sequence[tuple[float, ...]]) -> bool:
        """Whether what is staged is exact in 16 bits, padding included."""
        is_constant = self.padding == "MARGIN_CONSTANT"
        staged = (0.0, *(fills[self.padding_fill] if is_constant else ()))
        return all(_is_exact_in_16(value, self.variant.source) for value in staged)


def _lower(low: GeometryLowering, step: Geometric, columns: Mapping[str, int]) -> None:
    """One geometric step as a call of ``Builder``."""
    match step:
        case Crop():
            _lower_crop(low, step, columns)
        case CenterCrop(size=(height, width)):
            low.calls.append(
                f"plan.crop((plan.width - {width}) / 2, (plan.height - {height}) / 2,"
                f" {width}, {height});"
            )
        case ResizedCrop():
            window = (
                f"int(pack[{columns[name]}])"
                for name in ("left", "top", "width", "height")
            )
            low.calls.append(f"plan.crop({', '.join(window)});")
            _lower_resize(low, step, step.size)
        case Resize():
            size = step.size if not isinstance(step.size, int) else None
            _lower_resize(low, step, size)
        case Flip():
            low.calls.append(f"if (!{_skip(columns)}) plan.flip_{step.axis}();")
        case Rotation():
            k = low.level(step.interpolation, "ZEROS", is_aligned=False)
            low.calls.append(
                f"plan.rotate<{k}>(pack[{columns['degrees']}], {_skip(columns)});"
            )
        case Affine():
            _lower_affine(low, step, columns)


def _lower_crop(low: GeometryLowering, step: Crop, columns: Mapping[str, int]) -> None:
    left, top = (f"int(pack[{columns[name]}])" for name in ("left", "top"))
    height, width = step.size
    if any(step.padding) or step.pad_if_needed:
        low.padding = MARGINS[step.padding_mode]
        if step.padding_mode == "constant":
            low.padding_fill = low.fill(step.fill)
        low.calls.append("plan.canvas();")
        pad_left, _, pad_top, _ = step.padding
        margin_x, margin_y = str(pad_left), str(pad_top)
        if step.pad_if_needed:
            margin_x = f"max({pad_left}, {width} - plan.width)"
            margin_y = f"max({pad_top}, {height} - plan.height)"
        left, top = f"{left} - {margin_x}", f"{top} - {margin_y}"
    low.calls.append(f"plan.crop({left}, {top}, {width}, {height});")


def _lower_resize(
    low: GeometryLowering, step: Resize | ResizedCrop, size: Size | None
) -> None:
    interpolation = step.interpolation
    corners = step.align_corners and interpolation != "exact"
    if low.is_composed and interpolation == "exact":
        interpolation = "round"
    k = low.level(interpolation, "CLAMP", is_aligned=True)
    if size is not None:
        low.calls.append(f"plan.resize<{k}, {_bool(corners)}>({size[1]}, {size[0]});")
        return
    side = step.side.upper() if isinstance(step, Resize) else ""
    low.calls.append(
        f"plan.resize_side<{k}, {_bool(corners)}, SIDE_{side}>({step.size});"
    )


def _lower_affine(
    low: GeometryLowering, step: Affine, columns: Mapping[str, int]
) -> None:
    border = {
        "zeros": "ZEROS",
        "border": "CLAMP",
        "fill": "FILL",
        "reflection": "REFLECT_CENTRES" if step.align_corners else "REFLECT_EDGES",
    }[step.border]
    fill = low.fill(step.fill) if step.border == "fill" else 0
    k = low.level(step.interpolation, border, is_aligned=False, fill=fill)
    numbers = [
        f"pack[{columns[name]}]" if name in columns else f"{otherwise}f"
        for name, otherwise in (
            ("degrees", 0.0),
            ("shift_x", 0.0),
            ("shift_y", 0.0),
            ("scale_x", 1.0),
            ("scale_y" if "scale_y" in columns else "scale_x", 1.0),
            ("shear_x", 0.0),
            ("shear_y", 0.0),
        )
    ]
    low.calls.append(f"plan.affine<{k}>({', '.join(numbers)}, {_skip(columns)});")


def _skip(columns: Mapping[str, int]) -> str:
    return f"(pack[{columns['skip']}] != 0.0f)" if "skip" in columns else "false"


def _is_exact_in_16(value: float, source: Pixel) -> bool:
    """Whether a value beyond the canvas is exact in the 16 bits a source stages in."""
    if source in ("u8", "f16"):
        return abs(value) < 65504 and struct.unpack("e", struct.pack("e", value)) == (
            value,
        )
    return source == "bf16" and struct.pack(">f", value)[2:] == bytes(2)


def _bool(value: object) -> str:
    return "true" if value else "false"
