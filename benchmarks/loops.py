"""How does a training loop advance by one step, and end?

Pipelines are measured as loops, since some of them, such as training with two streams
written by hand, are not a series of batches that a step is then applied to.
"""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

__all__ = ["Loop", "Over", "Repeat", "Step", "Trainer", "no_step"]

Step = Callable[[torch.Tensor, torch.Tensor], object]


class Loop(Protocol):
    """A training loop that is running."""

    @property
    def pinned_bytes(self) -> int:
        """Page-locked host memory that torch's own allocator does not know of."""

    def advance(self) -> None:
        """Do one step: get a batch, train on it."""

    def close(self) -> None:
        """End it: threads and workers are gone afterwards."""


Trainer = Callable[[Step], Loop]
"""Starts a loop that trains by this step."""


def no_step(images: Any, labels: Any) -> None:
    """Train not at all: what is left is the input pipeline."""


class Over:
    """Takes a step on each batch of a pipeline.

    Args:
        batches: Gives (inputs, labels); ``close`` and ``pinned_bytes`` are its own, if
            it has them.
        step: Called with both.
    """

    def __init__(
        self, batches: Iterator[tuple[torch.Tensor, torch.Tensor]], step: Step
    ) -> None:
        self._batches = batches
        self._step = step

    @property
    def pinned_bytes(self) -> int:
        """What the pipeline says of its own."""
        return int(getattr(self._batches, "pinned_bytes", 0))

    def advance(self) -> None:
        """Do one step."""
        self._step(*next(self._batches))

    def close(self) -> None:
        """Close the pipeline, if it can be closed."""
        close = getattr(self._batches, "close", None)
        if close is not None:
            close()


class Repeat:
    """Calls a function again and again: a transform alone, without a pipeline."""

    pinned_bytes = 0

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work

    def advance(self) -> None:
        """Call it once."""
        self._work()

    def close(self) -> None:
        """Nothing to end."""
