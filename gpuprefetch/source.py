"""What kind of source is this, and how is it started where a pass begins?"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from gpuprefetch.errors import StateError
from gpuprefetch.generators import (
    PartsOfSource,
    global_generators,
    put_back,
    write_states,
)
from gpuprefetch.indices import has_index_stream, start_at_index
from gpuprefetch.progress import Origin, Progress

__all__ = ["SourceTraits", "StartedSource", "start_source"]

_logger = logging.getLogger(__name__)

# Below this, generators belong to the data set: they move as samples are loaded.
_DATASET = "source.dataset"


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
    is_stream: bool
    """It is a DataLoader of an IterableDataset: it has no indices."""
    has_indices: bool
    """It is a DataLoader whose batches can be passed over without loading them."""

    @staticmethod
    def of(source: object) -> "SourceTraits":
        """Look at a source without starting it."""
        has_workers = isinstance(source, DataLoader) and source.num_workers > 0
        keeps_state = callable(getattr(source, "state_dict", None)) and callable(
            getattr(source, "load_state_dict", None)
        )
        is_one_shot = isinstance(source, Iterator)
        is_stream = isinstance(source, DataLoader) and isinstance(
            source.dataset, IterableDataset
        )
        is_persistent = has_workers and bool(
            getattr(source, "persistent_workers", False)
        )
        return SourceTraits(
            has_workers=has_workers,
            makes_private_batches=has_workers and _has_own_iter(source),
            shares_iterator=is_persistent or is_one_shot or keeps_state,
            keeps_state=keeps_state,
            is_one_shot=is_one_shot,
            is_stream=is_stream,
            has_indices=(
                isinstance(source, DataLoader)
                and not is_stream
                and has_index_stream(source)
            ),
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


def start_source(
    source: Any,
    traits: SourceTraits,
    progress: Progress,
    *,
    replay: bool | None,
    is_threaded: bool,
) -> StartedSource:
    """Start the source's iterator where ``progress`` says.

    The global generators are set for the moment in which the source starts, and put
    back. Generators of its own are set and stay, as in the pass that is repeated.

    Args:
        source: Has loaded its state already, if it keeps one.
        traits: What kind of source it is.
        progress: Fresh, or loaded; then ``yielded`` batches are passed over.
        replay: Whether these are loaded and dropped; ``None`` decides by what it takes
            to be exact.
        is_threaded: Another thread pulls it, even without workers. Then a DataLoader's
            sampler draws its order now: over there, at its first pull, it would draw
            from torch's generator at the same time as the loop and other transforms.

    Raises:
        StateError: The source ended before the batches that were yielded.
    """
    origin = progress.origin
    if traits.keeps_state or origin is None or not progress.is_started:
        return _start_whole(source, traits, origin, is_threaded)
    if replay is None:
        replay = _must_replay(traits, origin)
    with put_back(global_generators()):
        write_states(global_generators(), origin.generators)
        write_states(_own_generators(source, replay), origin.generators)
        if traits.has_indices:
            return _start_by_index(source, origin, progress.yielded, replay)
        return _start_by_pulling(source, progress.yielded)


def _start_whole(
    source: Any, traits: SourceTraits, origin: Origin | None, is_threaded: bool
) -> StartedSource:
    """Start at the first batch, in a fresh pass or after a pause that was loaded."""
    may_draw_beside = is_threaded and not traits.has_workers
    keeps_workers = origin is not None and traits.shares_iterator
    by_index = traits.has_indices and not traits.keeps_state
    if by_index and (may_draw_beside or keeps_workers):
        continues_workers = origin is not None and origin.continues_workers
        iterator, _ = start_at_index(source, 0, continues_workers=continues_workers)
    else:
        iterator = iter(source)
    return StartedSource(iterator, [])


def _must_replay(traits: SourceTraits, origin: Origin) -> bool:
    """Tell whether the data set draws from generators that loading alone moves on.

    New worker processes start with generators of their own; those that went on from an
    earlier pass are beyond repeating. In the loop's process the data set draws from the
    global generators, which are the user's to restore, or from some that it holds.
    """
    if traits.has_workers:
        return not origin.continues_workers
    return any(name.startswith(_DATASET) for name in origin.generators)


def _own_generators(source: object, replay: bool) -> dict[str, Any]:
    return {
        name: generator
        for name, generator in PartsOfSource(source).generators.items()
        if replay or not name.startswith(_DATASET)
    }


def _start_by_index(
    source: Any, origin: Origin, yielded: int, replay: bool
) -> StartedSource:
    """Start a DataLoader; load what was yielded only if asked to."""
    iterator, skipped = start_at_index(
        source,
        0 if replay else yielded,
        continues_workers=origin.continues_workers,
    )
    if replay:
        skipped = _drop(iterator, yielded)
    _check_skipped(skipped, yielded)
    return StartedSource(iterator, [])


def _start_by_pulling(source: Any, yielded: int) -> StartedSource:
    """Start any source; whatever it draws for its order, it draws by the first pull."""
    iterator: Iterator[Any] = iter(source)
    if yielded == 0:
        return StartedSource(iterator, list(islice(iterator, 1)))
    _check_skipped(_drop(iterator, yielded), yielded)
    return StartedSource(iterator, [])


def _drop(iterator: Iterator[Any], count: int) -> int:
    """Pull batches that were yielded before; give how many there were."""
    if count:
        _logger.info(
            "going on after %d batches, which are read again and dropped; see replay",
            count,
        )
    return sum(1 for _ in islice(iterator, count))


def _check_skipped(skipped: int, yielded: int) -> None:
    if skipped < yielded:
        raise StateError(
            f"the state says that {yielded} batches were yielded, but the source has "
            f"only {skipped}. Is it the same source?"
        )
