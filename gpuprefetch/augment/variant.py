"""What is said besides the plan: what a caller wants, what a launch is compiled for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from gpuprefetch.augment.plan import Outside, Resampling

__all__ = ["How", "Pixel", "Tile", "Variant", "chunk_of"]

Pixel = Literal["u8", "u16", "f16", "bf16", "f32"]


class How(NamedTuple):
    """How a caller wants a plan to be run. A tuple, since it is hashed per batch."""

    dtype: torch.dtype
    """Of the result: float16, bfloat16 or float32."""
    is_channels_last: bool = False
    """Memory format of the result."""
    resampling: Resampling = "chained"
    outside: Outside = "zeros"


@dataclass(frozen=True, slots=True)
class Tile:
    """How a launch is cut into blocks; measured choices, not part of the result."""

    x: int = 64
    y: int = 32
    threads: int = 256
    strip: int = 8
    """Rows that a thread blurs; divides ``y``."""
    min_blocks: int = 1
    """Blocks that must fit on a multiprocessor: bounds the registers."""
    stage_texels: int = 1850
    """Room for the source in shared memory, in pixels; 0: never staged."""
    stages_floats: bool = False
    """Stage 32 bits per channel even where 16 are exact."""


@dataclass(frozen=True, slots=True)
class Variant:
    """What a launch is compiled for, besides the plan."""

    channels: int
    source: Pixel
    output: Literal["f16", "bf16", "f32"]
    is_channels_last: bool = False
    resampling: Resampling = "chained"
    outside: Outside = "zeros"
    is_ragged: bool = False
    """Each sample has its own address, size and strides."""


def chunk_of(channels: int) -> int:
    """Channels that one block makes."""
    if channels <= 4:
        return channels
    return 3 if channels % 3 == 0 and channels % 4 else 4
