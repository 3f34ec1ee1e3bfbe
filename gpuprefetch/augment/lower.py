"""How does a launch become a kernel: which constants does it need?

The constants of a launch are a header of ``#define`` lines in front of ``kernel.cu``.
The header depends on the plan, the image's channels and the pixel types, not on image
sizes. How geometry is said is told here, the rest in ``lower_values``.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gpuprefetch.augment.column import Size
from gpuprefetch.augment.launches import Launch, mean_launch
from gpuprefetch.augment.lower_values import ValueLowering, channel_values, table
from gpuprefetch.augment.plan import Plan
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
from gpuprefetch.augment.values import Blur
from gpuprefetch.augment.variant import Pixel, Tile, Variant, chunk_of

__all__ = ["write_header"]

_FULL_SCALE: Mapping[Pixel, float] = {"u8": 255.0, "u16": 65535.0}
_INTERPOLATION: Mapping[Interpolation, str] = {
    "bilinear": "BILINEAR",
    "round": "ROUND",
    "exact": "EXACT",
}
_MARGIN = {
    "constant": "MARGIN_CONSTANT",
    "reflect": "MARGIN_REFLECT",
    "replicate": "MARGIN_REPLICATE",
    "circular": "MARGIN_CIRCULAR",
}


@dataclass(slots=True)
class _Lowering:
    """What has been said so far."""

    variant: Variant
    calls: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    fills: list[tuple[float, ...]] = field(default_factory=list)
    padding: str = "MARGIN_NONE"
    padding_fill: int = 0
    interpolations: list[Interpolation] = field(default_factory=list)

    @property
    def unit(self) -> float:
        """What 1.0 is in the source's numbers."""
        return _FULL_SCALE.get(self.variant.source, 1.0)

    def fill(self, values: Sequence[float]) -> int:
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
        self.interpolations.append(interpolation)
        aligned = "true" if is_aligned else "false"
        how = _INTERPOLATION[interpolation]
        self.kinds.append(f"{{{how}, {border}, {aligned}, {fill}}}")
        return len(self.kinds) - 1


def write_header(plan: Plan, launch: Launch, variant: Variant, tile: Tile) -> str:
    """The ``#define`` lines for one launch."""
    steps = plan.steps[launch.first : launch.last]
    layout = plan.layout[launch.first : launch.last]
    geometry = [
        (step, columns)
        for step, columns in zip(steps, layout, strict=True)
        if isinstance(step, Geometric)
    ]
    resampled = [s for s, _ in geometry if not isinstance(s, Crop | CenterCrop | Flip)]
    is_composed = variant.resampling == "single" and (
        len(resampled) > 1 or (bool(resampled) and variant.outside == "extend")
    )
    low = _Lowering(variant)
    for step, columns in geometry:
        _lower(low, step, columns, is_composed=is_composed)
    kinds, single_read = low.kinds, "BILINEAR"
    is_extended = is_composed and variant.outside == "extend"
    if is_composed and "bilinear" not in low.interpolations:
        single_read = "ROUND"
    if is_extended:
        kinds = [f"{{{single_read}, ZEROS, false, 0}}"] * len(kinds)
    is_interpolated = any("BILINEAR" in kind for kind in kinds)
    stage = tile.stage_texels if is_interpolated else 0
    blur = next((s for s in steps if isinstance(s, Blur)), None)
    blur_columns = next(
        (c for s, c in zip(steps, layout, strict=True) if isinstance(s, Blur)), {}
    )
    radius_y, radius_x = (
        (blur.kernel_size[0] // 2, blur.kernel_size[1] // 2) if blur else (0, 0)
    )
    values = ValueLowering(variant.channels)
    per_pixel, per_value = values.lower(steps, layout, 1.0 / low.unit)
    has_mean = not launch.is_mean and mean_launch(plan, launch) is not None
    fills = low.fills or [(0.0,) * variant.channels]
    staged_fill = fills[low.padding_fill] if low.padding == "MARGIN_CONSTANT" else ()
    is_exact_16 = all(_fits_16(value, variant.source) for value in (0.0, *staged_fill))
    defines: dict[str, object] = {
        f"SOURCE_{variant.source.upper()}": 1,
        f"OUTPUT_{variant.output.upper()}": 1,
        "IS_CHANNELS_LAST": int(variant.is_channels_last),
        "IS_RAGGED": int(variant.is_ragged),
        "STAGE_16": int(is_exact_16 and not tile.stages_floats),
        "PLAN_THREADS": tile.threads,
        "PLAN_MIN_BLOCKS": tile.min_blocks,
        "PLAN_TILE_X": tile.x,
        "PLAN_TILE_Y": tile.y,
        "PLAN_STRIP": tile.strip,
        "PLAN_CHANNELS": variant.channels,
        "PLAN_CHUNK": chunk_of(variant.channels),
        "PLAN_STAGE_TEXELS": stage,
        "PLAN_PACK_WIDTH": plan.width,
        "PLAN_LEVELS": len(kinds),
        "PLAN_KINDS": ", ".join(kinds) or "{BILINEAR, ZEROS, true, 0}",
        "PLAN_SINGLE": _bool(is_composed and not is_extended),
        "PLAN_EXTENDED": _bool(is_extended),
        "PLAN_TOP_VIEW": _bool(low.interpolations[-1:] == ["exact"]),
        "PLAN_SINGLE_READ": single_read,
        "PLAN_PADDING": low.padding,
        "PLAN_PADDING_FILL": low.padding_fill,
        "PLAN_RADIUS_X": radius_x,
        "PLAN_RADIUS_Y": radius_y,
        "PLAN_BLUR_MARGIN": _MARGIN[blur.border] if blur else "MARGIN_NONE",
        "PLAN_SIGMA_COLUMN": blur_columns.get("sigma", 0),
        "PLAN_SKIP_COLUMN": blur_columns.get("skip", -1),
        "PLAN_IS_MEAN": int(launch.is_mean),
        "PLAN_HAS_MEAN": int(has_mean),
        "PLAN_POINT_SCALE": table(values.scales, variant.channels),
        "PLAN_POINT_BIAS": table(values.biases, variant.channels),
        "PLAN_FILLS": table(fills, variant.channels),
        "PLAN_STEPS": " ".join(low.calls),
        "PLAN_PER_PIXEL": per_pixel,
        "PLAN_PER_VALUE": per_value,
    }
    return "".join(f"#define {name} {value}\n" for name, value in defines.items())


def _lower(
    low: _Lowering, step: Geometric, columns: Mapping[str, int], *, is_composed: bool
) -> None:
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
            _lower_resize(low, step, step.size, is_composed=is_composed)
        case Resize():
            size = step.size if not isinstance(step.size, int) else None
            _lower_resize(low, step, size, is_composed=is_composed)
        case Flip():
            low.calls.append(f"if (!{_skip(columns)}) plan.flip_{step.axis}();")
        case Rotation():
            k = low.level(step.interpolation, "ZEROS", is_aligned=False)
            low.calls.append(
                f"plan.rotate<{k}>(pack[{columns['degrees']}], {_skip(columns)});"
            )
        case Affine():
            _lower_affine(low, step, columns)


def _lower_crop(low: _Lowering, step: Crop, columns: Mapping[str, int]) -> None:
    left, top = (f"int(pack[{columns[name]}])" for name in ("left", "top"))
    height, width = step.size
    if any(step.padding) or step.pad_if_needed:
        low.padding = _MARGIN[step.padding_mode]
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
    low: _Lowering, step: Resize | ResizedCrop, size: Size | None, *, is_composed: bool
) -> None:
    interpolation = step.interpolation
    corners = step.align_corners and interpolation != "exact"
    if is_composed and interpolation == "exact":
        interpolation = "round"
    k = low.level(interpolation, "CLAMP", is_aligned=True)
    if size is not None:
        low.calls.append(f"plan.resize<{k}, {_bool(corners)}>({size[1]}, {size[0]});")
        return
    side = step.side.upper() if isinstance(step, Resize) else ""
    low.calls.append(
        f"plan.resize_side<{k}, {_bool(corners)}, SIDE_{side}>({step.size});"
    )


def _lower_affine(low: _Lowering, step: Affine, columns: Mapping[str, int]) -> None:
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


def _fits_16(value: float, source: Pixel) -> bool:
    """Whether a value beyond the canvas is exact in the 16 bits a source stages in."""
    if source in ("u8", "f16"):
        return abs(value) < 65504 and struct.unpack("e", struct.pack("e", value)) == (
            value,
        )
    return source == "bf16" and struct.pack(">f", value)[2:] == bytes(2)


def _bool(value: object) -> str:
    return "true" if value else "false"
