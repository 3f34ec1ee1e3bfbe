"""What has been yielded, and how does another loader go on from there?

[Note: Resume counts what was yielded]
A loader is ahead of its loop, and so is the state of its source. What is saved is the
source's state as it was right after the last batch that the *loop* got, which each
entry carries along. Where the source keeps no state, the state of torch's generator at
the start of the epoch stands for the order of the samples: it is set again for the
moment in which the source starts, and the batches that were yielded are pulled and
dropped.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from gpuprefetch.errors import StateError

__all__ = ["Progress", "StartedSource", "start_source"]

_VERSION = 1


@dataclass(slots=True)
class Progress:
    """How far the newest pass of a loader has come."""

    epoch: int = 0
    """Number of the pass, counted from 0; of the next one between two passes."""
    yielded: int = 0
    """Batches of this pass that the loop got."""
    base_seed: int | None = None
    """Base seed of this pass; ``None`` before it starts, or without a transform."""
    source_state: Any = None
    """State of a source that keeps one, after the last yielded batch."""
    generator_state: torch.Tensor | None = None
    """torch's CPU generator before ``iter(source)``, (n,) uint8; ``None`` between
    two passes."""

    def finish_epoch(self) -> None:
        """Note that the pass came to its end; the next one starts afresh."""
        self.epoch += 1
        self.yielded = 0
        self.base_seed = None
        self.generator_state = None

    def to_state(self) -> dict[str, Any]:
        """Write this down as a dict that ``torch.save`` takes."""
        return {
            "version": _VERSION,
            "epoch": self.epoch,
            "yielded": self.yielded,
            "base_seed": self.base_seed,
            "source_state": self.source_state,
            "generator_state": self.generator_state,
        }

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> "Progress":
        """Read what :meth:`to_state` wrote.

        Raises:
            StateError: It was written by another version, or is something else.
        """
        version = state.get("version") if isinstance(state, Mapping) else None
        if version != _VERSION:
            raise StateError(
                f"expected a state of version {_VERSION} as state_dict() of a "
                f"StreamPrefetchLoader gives it, got version {version!r} in a "
                f"{type(state).__name__}."
            )
        expected = Progress().to_state().keys()
        if state.keys() != expected:
            raise StateError(
                f"a state of version {_VERSION} has the entries {sorted(expected)}, "
                f"got {sorted(state)}. Pass what state_dict() gave, unchanged."
            )
        return Progress(**{key: state[key] for key in expected if key != "version"})


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
