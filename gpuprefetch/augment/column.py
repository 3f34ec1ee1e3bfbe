"""Which number does a step need per sample, and how is it drawn?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["Column", "Size", "skip_column"]

Size: TypeAlias = tuple[int, int]
"""(height, width) in pixels."""


@dataclass(frozen=True, slots=True)
class Column:
    """One number per sample: uniform in [low, high), rounded down if ``is_whole``."""

    name: str
    low: float
    high: float
    is_whole: bool = False
    is_shared: bool = False
    """One draw for the whole batch."""


def skip_column(p: float, *, is_shared: bool) -> tuple[Column, ...]:
    """The column that is 1 where a sample is left alone and 0 where it is changed.

    ``floor(u + (1 - p))`` with u uniform in [0, 1) is 0 with probability p.
    """
    if p >= 1.0:
        return ()
    return (Column("skip", 1.0 - p, 2.0 - p, is_whole=True, is_shared=is_shared),)
