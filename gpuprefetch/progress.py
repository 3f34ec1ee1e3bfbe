"""What has been yielded, and how is it written down?

[Note: Resume counts what was yielded]
A loader is ahead of its loop, and so is the state of its source. What is saved is the
source's state as it was right after the last batch that the *loop* got, which each
entry carries along. Where the source keeps no state, the state of torch's generator at
the start of the epoch stands for the order of the samples: it is set again for the
moment in which the source starts, and the batches that were yielded are pulled and
dropped.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from gpuprefetch.errors import StateError

__all__ = ["Progress"]

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
    seed: int | None = None
    """The loader's ``seed``, for which ``base_seed`` and the epochs' pixels hold."""
    is_loaded: bool = False
    """It came from ``load_state_dict``: the next pass goes on from it."""

    @property
    def is_between_passes(self) -> bool:
        """Whether the newest pass came to its end."""
        return self.epoch > 0 and self.generator_state is None and not self.is_loaded

    def next_pass(self) -> "Progress":
        """Say where the pass after this one begins."""
        if self.is_loaded:
            return replace(self, is_loaded=False)
        # A pass that was broken off keeps its number; the next one has its own.
        was_started = self.generator_state is not None
        return Progress(
            epoch=self.epoch + 1 if was_started else self.epoch,
            source_state=None if was_started else self.source_state,
        )

    def finish_pass(self) -> None:
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
            "seed": self.seed,
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
                f"{type(state).__name__}. Save it again with the version in use."
            )
        expected = Progress().to_state().keys()
        if state.keys() != expected:
            raise StateError(
                f"a state of version {_VERSION} has the entries {sorted(expected)}, "
                f"got {sorted(state)}. Pass what state_dict() gave, unchanged."
            )
        fields = {key: state[key] for key in expected if key != "version"}
        if isinstance(fields["generator_state"], torch.Tensor):
            # torch.load(map_location=...) may have moved it.
            fields["generator_state"] = fields["generator_state"].cpu()
        return Progress(**fields, is_loaded=True)
