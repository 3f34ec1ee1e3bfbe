"""Into which blocks is a launch cut?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gpuprefetch.augment.column import Size
from gpuprefetch.augment.launches import Launch
from gpuprefetch.augment.lower import write_header
from gpuprefetch.augment.plan import Plan
from gpuprefetch.augment.steps import Affine, Resize, ResizedCrop, Rotation, Step
from gpuprefetch.augment.values import Blur
from gpuprefetch.augment.variant import Tile, Variant, chunk_of

__all__ = ["choose_tile", "shared_bytes"]


@dataclass(frozen=True, slots=True)
class _Cut:
    """One way to cut a launch, and the shared memory that it may take."""

    x: int
    y: int
    threads: int
    blocks: int
    """On a multiprocessor; bounds the registers to 64 for each thread."""
    most_bytes: int


# Shared memory of a Hopper multiprocessor is 227 KiB for all its blocks; one block may
# take 99 KiB on every supported GPU.
_DEFAULT = (_Cut(64, 32, 256, 4, 54 * 1024), _Cut(32, 32, 256, 4, 54 * 1024))

# In order of preference. Measured on an H200 (us; 3x256x256, B=32 / B=128):
#
#                         64x64          32x32          64x32
#   seed chain, chained   35.4 / 123.9   35.1 / 124.8   54.5 / 154.3
#   seed chain, single    29.8 / 109.5   32.2 / 109.2   30.6 / 106.1
#
# With a blur, 64x32 pays for its margin; 64x64 has a smaller one, and 32x32 has eight
# blocks on a multiprocessor that cover each other's barriers.
_CHAINED_BLUR = (
    _Cut(64, 64, 512, 2, 99 * 1024),
    _Cut(32, 32, 128, 8, 27 * 1024),
    *_DEFAULT,
)

# RandomResizedCrop to 224, bf16 channels_last, B=256: 98.1 us; 64x32: 102.6, 32x32:
# 109.4.
_RESIZED_CROP = (_Cut(32, 64, 256, 4, 54 * 1024), *_DEFAULT)


def choose_tile(plan: Plan, launch: Launch, variant: Variant, size: Size) -> Tile:
    """The tile for a launch on images of this size.

    The first of the cuts above whose part of the source fits into shared memory, at any
    angle; benchmarks/NOTES.md has the figures.
    """
    walk = list(plan.walk(size))[launch.first : launch.last]
    steps = [step for step, _, _ in walk]
    blur = next((step for step in steps if isinstance(step, Blur)), None)
    radius = max(blur.kernel_size) // 2 if blur else 0
    for step in steps:
        size = step.output_size(size)
    cuts: tuple[_Cut, ...] = _DEFAULT
    if blur and variant.resampling == "chained":
        # A large tile that hangs over the image's edge would undo its advantage.
        is_wasteful = _covered(size, 64) > 1.15 * _covered(size, 32)
        cuts = _CHAINED_BLUR[1:] if is_wasteful else _CHAINED_BLUR
    elif not blur and any(isinstance(step, ResizedCrop) for step in steps):
        cuts = _RESIZED_CROP
    zoom, is_rotated = _zoom(walk)
    for cut in cuts:
        width, height = cut.x + 2 * radius, cut.y + 2 * radius
        if is_rotated:
            width = height = round((width + height) * 0.7072)
        texels = (int(width * zoom) + 6) * (int(height * zoom) + 6)
        blocks = cut.blocks if radius <= 4 else min(cut.blocks, 2)
        tile = Tile(
            cut.x,
            cut.y,
            threads=cut.threads,
            min_blocks=blocks,
            stage_texels=-(-texels // 64) * 64,
        )
        if shared_bytes(plan, launch, variant, tile) <= cut.most_bytes:
            return tile
    return _staged_in_part(plan, launch, variant, tile)


def _covered(size: Size, side: int) -> int:
    """Pixels in all square tiles of an image."""
    return -(-size[0] // side) * -(-size[1] // side) * side * side


_THIRD = 72 * 1024  # Bytes of shared memory for each of 3 blocks.


def _staged_in_part(plan: Plan, launch: Launch, variant: Variant, tile: Tile) -> Tile:
    """Strong shrinking: only some tiles' source fits. The others are read directly."""
    tile = replace(tile, min_blocks=min(tile.min_blocks, 3))
    whole = shared_bytes(plan, launch, variant, tile)
    if whole <= _THIRD:
        return tile
    planes = shared_bytes(plan, launch, variant, replace(tile, stage_texels=0))
    texel = (whole - planes) // tile.stage_texels
    texels = max(_THIRD - planes, 0) // texel
    return replace(tile, stage_texels=texels // 64 * 64)


def _zoom(
    walk: Sequence[tuple[Step, Mapping[str, int], Size]],
) -> tuple[float, bool]:
    """Source pixels per output pixel along an axis at most, and whether it may turn.

    Rounded up to a step of a quarter of an octave: images of many sizes share a few
    kernels, where otherwise almost every size would be compiled anew.
    """
    zoom, is_rotated = 1.0, False
    for step, _, size in walk:
        out = step.output_size(size)
        if isinstance(step, Resize | ResizedCrop):
            zoom *= max(size[0] / out[0], size[1] / out[1])
        if isinstance(step, ResizedCrop):
            zoom *= min(max(step.scale), 1.0) ** 0.5
        elif isinstance(step, Affine) and step.scale is not None:
            zoom /= min(min(step.scale), 1.0)
        is_rotated = is_rotated or isinstance(step, Rotation | Affine)
    return 2.0 ** (math.ceil(4.0 * math.log2(zoom) - 1e-6) / 4.0), is_rotated


def shared_bytes(plan: Plan, launch: Launch, variant: Variant, tile: Tile) -> int:
    """Dynamic shared memory of a block: the blur's planes, then the staged source."""
    defines = dict(
        line.split(" ", 2)[1:]
        for line in write_header(plan, launch, variant, tile).splitlines()
    )
    radius_x, radius_y = (int(defines[f"PLAN_RADIUS_{axis}"]) for axis in "XY")
    chunk = chunk_of(variant.channels)
    row = (tile.x + 2 * radius_x + 3) // 4 * 4
    planes = chunk * row * (tile.y + 2 * radius_y) * 4 if radius_x or radius_y else 0
    texel = (4 if chunk == 3 else chunk) * (2 if defines["STAGE_16"] == "1" else 4)
    return planes + int(defines["PLAN_STAGE_TEXELS"]) * texel
