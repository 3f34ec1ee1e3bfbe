"""How does a DataLoader start in the middle of its order, without loading the rest?

A map-style DataLoader asks its sampler for the indices of one batch after the other.
For the start of one pass a stand-in takes the sampler's place: it lets the sampler
begin as ever, throws away the indices of batches that were yielded, and gives the
others. The user's DataLoader gets its sampler back before the first batch is loaded.

[Note: Draws of a start]
torch's iterator asks for ``iter(sampler)``, draws a seed for the workers, and takes the
first indices, in which a sampler draws its order. The stand-in leaves that sequence
as it is. Persistent workers draw no seed when they go on with another epoch; where
such a start is repeated with new workers, the sampler is started before them, and
their seed is drawn from a copy of the generator.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader

__all__ = ["has_index_stream", "persistent_iterator", "start_at_index"]


def has_index_stream(source: DataLoader[Any]) -> bool:
    """Tell whether torch's own code iterates this map-style DataLoader."""
    kind = type(source)
    return (
        kind.__iter__ is DataLoader.__iter__
        and kind._get_iterator is DataLoader._get_iterator
    )


def persistent_iterator(source: object) -> Any:
    """Give the iterator whose workers wait for the next pass, or ``None``."""
    if not getattr(source, "persistent_workers", False):
        return None
    return getattr(source, "_iterator", None)


def start_at_index(
    source: DataLoader[Any], num_skipped: int, *, continues_workers: bool
) -> tuple[Iterator[Any], int]:
    """Start a pass that goes on after the indices of ``num_skipped`` batches.

    The sampler has drawn its order when this returns.

    Args:
        source: See :func:`has_index_stream`.
        num_skipped: Batches at the start that are not loaded.
        continues_workers: The pass that is repeated went on with earlier workers.

    Returns:
        The iterator, and how many batches were skipped: fewer than asked for if the
        sampler has no more.
    """
    running = persistent_iterator(source)
    if running is not None and not continues_workers:
        # Workers draw from seeds of their own: a new start needs new ones.
        running._shutdown_workers()
        source._iterator = running = None
    real = source._index_sampler
    stand_in = _StandIn(real, num_skipped)
    if running is not None:
        running._index_sampler = stand_in
        try:
            iterator: Any = iter(source)
        finally:
            running._index_sampler = real
    elif continues_workers:
        stand_in.start_now()
        with _seed_drawn_elsewhere(source):
            iterator = _start_anew(source, stand_in)
    else:
        iterator = _start_anew(source, stand_in)
    return iterator, stand_in.prime()


@contextmanager
def _seed_drawn_elsewhere(source: DataLoader[Any]) -> Iterator[None]:
    """Let the seed of workers come from a copy of the generator that it comes from."""
    settings = vars(source)
    real = settings["generator"]
    copied = torch.Generator()
    copied.set_state((torch.default_generator if real is None else real).get_state())
    settings["generator"] = copied
    try:
        yield
    finally:
        settings["generator"] = real


def _start_anew(source: DataLoader[Any], stand_in: "_StandIn") -> Any:
    """Make an iterator that takes its indices from the stand-in."""
    name = "sampler" if source.batch_sampler is None else "batch_sampler"
    # Not by setattr, which a DataLoader refuses once it is made.
    settings = vars(source)
    real, settings[name] = settings[name], stand_in
    try:
        iterator: Any = iter(source)
    finally:
        settings[name] = real
    iterator._index_sampler = real
    return iterator


class _StandIn:
    """In the place of a sampler for the start of one pass.

    Args:
        sampler: The real one.
        num_skipped: Of its items, how many the pass does not get.
    """

    def __init__(self, sampler: Any, num_skipped: int) -> None:
        self._sampler = sampler
        self._num_skipped = num_skipped
        self._rest: _Rest | None = None

    def start_now(self) -> None:
        """Let the sampler draw now, and not when it is asked."""
        self._rest = _Rest(iter(self._sampler), self._num_skipped)
        self._rest.prime()

    def __iter__(self) -> "_Rest":
        if self._rest is None or not self._rest.is_primed:
            self._rest = _Rest(iter(self._sampler), self._num_skipped)
        return self._rest

    def __len__(self) -> int:
        return len(self._sampler)

    def prime(self) -> int:
        """Let the sampler draw, if it has not; give how many items were skipped."""
        assert self._rest is not None, "torch took the indices from elsewhere"
        self._rest.prime()
        return self._rest.skipped


class _Rest(Iterator[Any]):
    """What an iterator gives after its first items, taken when they are needed."""

    def __init__(self, items: Iterator[Any], num_skipped: int) -> None:
        self._items = items
        self._num_skipped = num_skipped
        self.skipped = 0
        # The next item, taken before its time: none, or one.
        self._taken: list[Any] = []
        self.is_primed = False

    def prime(self) -> None:
        """Skip, and take the first item that is not skipped."""
        if not self.is_primed:
            self.is_primed = True
            self.skipped = sum(1 for _ in islice(self._items, self._num_skipped))
            self._taken = list(islice(self._items, 1))

    def __next__(self) -> Any:
        self.prime()
        return self._taken.pop() if self._taken else next(self._items)
