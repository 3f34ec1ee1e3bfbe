"""What kind of source is this, and how is it started where a pass begins?"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader

from gpuprefetch.errors import StateError
from gpuprefetch.progress import Progress

__all__ = ["SourceTraits", "StartedSource", "start_source"]


@dataclass(frozen=True, slots=True)
class SourceTraits:
    """What the kind of a source says about how to treat it."""

    has_workers: bool
    """It is a DataLoader with worker processes."""
    makes_private_batches: bool
    """Each batch has memory of its own, which is never written to again: worker
    processes made it, and no ``__iter__`` of a subclass handled it after that."""
    shares_iterator: bool
    """``iter()`` gives the same iterator, or winds back the one before."""
    keeps_state: bool
    """It offers ``state_dict()`` and ``load_state_dict()``."""
    is_one_shot: bool
    """It is an iterator: a second pass goes on where the first one stopped."""

    @staticmethod
    def of(source: object) -> "SourceTraits":
        """Look at a source without starting it."""
        has_workers = isinstance(source, DataLoader) and source.num_workers > 0
        keeps_state = callable(getattr(source, "state_dict", None)) and callable(
            getattr(source, "load_state_dict", None)
        )
        is_one_shot = isinstance(source, Iterator)
        is_persistent = has_workers and bool(
            getattr(source, "persistent_workers", False)
        )
        return SourceTraits(
            has_workers=has_workers,
            makes_private_batches=has_workers and _has_own_iter(source),
            shares_iterator=is_persistent or is_one_shot or keeps_state,
            keeps_state=keeps_state,
            is_one_shot=is_one_shot,
        )


def _has_own_iter(source: object) -> bool:
    """Tell whether torch or torchdata wrote the ``__iter__`` of a DataLoader."""
    defined_in = getattr(type(source).__iter__, "__module__", "")  # type: ignore[attr-defined]
    return defined_in.partition(".")[0] in ("torch", "torchdata")


@dataclass(frozen=True, slots=True)
class StartedSource:
    """A source at the place where a pass begins."""

    iterator: Iterator[Any]
    """Gives what comes after ``pulled``."""
    pulled: list[Any]
    """Batches taken from it already that belong to the pass: none, or the first."""


def start_source(source: Any, progress: Progress) -> StartedSource:
    """Start the source's iterator where ``progress`` says.

    Args:
        source: Keeps no state of its own, or has loaded it already.
        progress: Fresh, or loaded; then ``yielded`` batches are skipped, if the source
            did not do that itself, and ``generator_state`` decides their order.

    Raises:
        StateError: The source ended before the batches that were yielded.
    """
    if progress.source_state is not None or progress.generator_state is None:
        return StartedSource(iter(source), [])
    generator = torch.default_generator
    current_state = generator.get_state()
    generator.set_state(progress.generator_state)
    try:
        iterator: Iterator[Any] = iter(source)
        # Skipped here, before the generator is put back, and with nothing to skip the
        # first batch is pulled here: a sampler may draw its order at the first pull.
        if progress.yielded == 0:
            return StartedSource(iterator, list(islice(iterator, 1)))
        for skipped in range(progress.yielded):
            try:
                next(iterator)
            except StopIteration:
                raise StateError(
                    f"the state says that {progress.yielded} batches were yielded, but "
                    f"the source has only {skipped}. Is it the same source?"
                ) from None
    finally:
        generator.set_state(current_state)
    return StartedSource(iterator, [])
