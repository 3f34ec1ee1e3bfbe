"""How does a launch become a kernel: which constants does it need?

The constants of a launch are a header of ``#define`` lines in front of ``kernel.cu``.
The header depends on the plan, the image's channels and the pixel types, not on image
sizes. How geometry is said is told in ``lower_geometry``, how pixels and values are
changed in ``lower_values``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpuprefetch.augment.launches import Launch, mean_launch
from gpuprefetch.augment.lower_geometry import MARGINS, GeometryLowering
from gpuprefetch.augment.lower_values import ValueLowering, table
from gpuprefetch.augment.plan import Plan
from gpuprefetch.augment.steps import Geometric, Step
from gpuprefetch.augment.values import Blur
from gpuprefetch.augment.variant import Tile, Variant, chunk_of

__all__ = ["write_header"]

_Placed = tuple[Step, Mapping[str, int]]


def write_header(plan: Plan, launch: Launch, variant: Variant, tile: Tile) -> str:
    """The ``#define`` lines for one launch."""
    steps = plan.steps[launch.first : launch.last]
    layout = plan.layout[launch.first : launch.last]
    placed = list(zip(steps, layout, strict=True))
    geometry = GeometryLowering.of(
        [(step, columns) for step, columns in placed if isinstance(step, Geometric)],
        variant,
    )
    values = ValueLowering(variant.channels)
    per_pixel, per_value = values.lower(steps, layout, 1.0 / geometry.unit)
    has_mean = not launch.is_mean and mean_launch(plan, launch) is not None
    defines = {
        **_image_defines(variant),
        **_tile_defines(tile),
        **geometry.defines(tile),
        **_blur_defines(placed),
        "PLAN_PACK_WIDTH": plan.width,
        "PLAN_IS_MEAN": int(launch.is_mean),
        "PLAN_HAS_MEAN": int(has_mean),
        "PLAN_POINT_SCALE": table(values.scales, variant.channels),
        "PLAN_POINT_BIAS": table(values.biases, variant.channels),
        "PLAN_PER_PIXEL": per_pixel,
        "PLAN_PER_VALUE": per_value,
    }
    return "".join(f"#define {name} {value}\n" for name, value in defines.items())


def _image_defines(variant: Variant) -> dict[str, object]:
    return {
        f"SOURCE_{variant.source.upper()}": 1,
        f"OUTPUT_{variant.output.upper()}": 1,
        "IS_CHANNELS_LAST": int(variant.is_channels_last),
        "IS_RAGGED": int(variant.is_ragged),
        "PLAN_CHANNELS": variant.channels,
        "PLAN_CHUNK": chunk_of(variant.channels),
    }


def _tile_defines(tile: Tile) -> dict[str, object]:
    return {
        "PLAN_THREADS": tile.threads,
        "PLAN_MIN_BLOCKS": tile.min_blocks,
        "PLAN_TILE_X": tile.x,
        "PLAN_TILE_Y": tile.y,
        "PLAN_STRIP": tile.strip,
    }


def _blur_defines(placed: Sequence[_Placed]) -> dict[str, object]:
    """Of the one blur that a launch may have."""
    radius_y = radius_x = 0
    margin, found = "MARGIN_NONE", dict[str, int]()
    for step, columns in placed:
        if isinstance(step, Blur):
            radius_y, radius_x = (size // 2 for size in step.kernel_size)
            margin, found = MARGINS[step.border], dict(columns)
    return {
        "PLAN_RADIUS_X": radius_x,
        "PLAN_RADIUS_Y": radius_y,
        "PLAN_BLUR_MARGIN": margin,
        "PLAN_SIGMA_COLUMN": found.get("sigma", 0),
        "PLAN_SKIP_COLUMN": found.get("skip", -1),
    }
