"""How many times as fast is one loop as another, and do the rounds allow to say so?

A gain is the median of the ratios of single rounds. Its interval is that of order
statistics: it assumes nothing about how times are distributed.
"""

from dataclasses import dataclass
from math import comb
from typing import Literal

from gpuprefetch.thresholds import NOTHING_TO_GAIN, TOO_WIDE

__all__ = ["Answer", "Gain", "interval_of_median"]

Answer = Literal["helps", "does not help", "slower", "cannot tell"]

# What an interval should cover, where there are enough rounds for it.
_CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Gain:
    """How many times as fast ours is as the plain loop."""

    median: float
    """Of the rounds' ratios; 1.0: the same."""
    low: float
    """Lower end of the interval of that median."""
    high: float
    """Upper end."""
    confidence: float
    """Share of such measurements whose interval holds the true median."""

    @property
    def is_confident(self) -> bool:
        """Whether there were rounds enough for a 95 % interval."""
        return self.confidence >= _CONFIDENCE

    @property
    def answer(self) -> Answer:
        """Say whether it helps, if the rounds are enough and agree enough to tell."""
        if not self.is_confident:
            return "cannot tell"
        if self.low > 1.0 and self.median >= 1.0 + NOTHING_TO_GAIN:
            return "helps"
        if self.high < 1.0 and self.median <= 1.0 - NOTHING_TO_GAIN:
            return "slower"
        if self.low < 1.0 - TOO_WIDE or self.high > 1.0 + TOO_WIDE:
            return "cannot tell"
        return "does not help"


def interval_of_median(values: list[float]) -> tuple[float, float, float]:
    """Give the shortest interval of order statistics that covers 95 %, or all.

    Returns:
        Its ends, and the share of samples of this size whose interval holds the true
        median. With fewer than six values that share is below 95 %.
    """
    ordered = sorted(values)
    count = len(ordered)
    for dropped in range((count - 1) // 2, -1, -1):
        # The median is missed if at most `dropped` values fall on one side of it.
        missed = 2 * sum(comb(count, few) for few in range(dropped + 1)) / 2**count
        if 1 - missed >= _CONFIDENCE or dropped == 0:
            return ordered[dropped], ordered[-1 - dropped], max(1 - missed, 0.0)
    raise AssertionError("unreachable: nothing dropped is always accepted")
