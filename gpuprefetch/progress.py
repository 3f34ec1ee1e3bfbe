"""What has been yielded, and how is it written down?

[Note: Resume counts what was yielded]
A loader is ahead of its loop, and so is the state of its source. What is saved is the
source's state as it was right after the last batch that the *loop* got, which each
entry carries along. Where the source keeps no state, its order is made again: the
random generators are set as they were when the pass began, the source is started, and
the batches that were yielded are passed over (see ``source``).
"""

import base64
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from types import UnionType
from typing import Any

from gpuprefetch.errors import StateError

__all__ = ["Origin", "Progress"]

_VERSION = 2

# Entries of a wrong state that a message lists.
_MOST_NAMED = 20


@dataclass(frozen=True, slots=True)
class Origin:
    """What sets the order of a pass, as it is right before ``iter(source)``."""

    generators: Mapping[str, Any]
    """States by name: the source's own, and once the pass has started the global ones;
    none where the source keeps a state."""
    continues_workers: bool = False
    """Worker processes of the pass before go on: their own random numbers do too."""


@dataclass(slots=True)
class Progress:
    """How far the newest pass of a loader has come."""

    epoch: int = 0
    """Number of the pass, counted from 0; of the next one between two passes."""
    yielded: int = 0
    """Batches of this pass that the loop got; the next one's number, for its seed."""
    seed: int | None = None
    """The loader's ``seed``, for which ``base_seed`` and the epochs' pixels hold."""
    base_seed: int | None = None
    """Base seed of this pass; ``None`` before it starts, or without a transform."""
    is_started: bool = False
    """The pass has begun; ``False`` between two passes."""
    origin: Origin | None = None
    """How the order of this pass comes about; ``None`` if that is still open."""
    set_epochs: Mapping[str, int] | None = None
    """What ``set_epoch`` had given parts of the source when the newest pass began."""
    source: Mapping[str, Any] | None = None
    """Marks by which the source is known again; see ``fingerprint``."""
    source_state: Any = None
    """State of a source that keeps one, after the last yielded batch."""
    is_loaded: bool = False
    """It came from ``load_state_dict``: the next pass goes on from it."""

    @property
    def is_between_passes(self) -> bool:
        """Whether the newest pass came to its end."""
        return self.epoch > 0 and not self.is_started and not self.is_loaded

    def next_pass(self) -> "Progress":
        """Say where the pass after this one begins."""
        if self.is_loaded:
            return replace(self, is_loaded=False)
        # A pass that was broken off keeps its number; the next one has its own.
        return Progress(
            epoch=self.epoch + self.is_started,
            source_state=None if self.is_started else self.source_state,
        )

    def finish_pass(self) -> None:
        """Note that the pass came to its end; the next one starts afresh."""
        self.epoch += 1
        self.yielded = 0
        self.base_seed = None
        self.is_started = False
        self.origin = None

    def to_state(self) -> dict[str, Any]:
        """Write this down in plain values, but for the state of the source."""
        origin = self.origin
        return {
            "version": _VERSION,
            "epoch": self.epoch,
            "yielded": self.yielded,
            "seed": self.seed,
            "base_seed": self.base_seed,
            "is_started": self.is_started,
            "origin": origin
            and {
                "generators": dict(origin.generators),
                "continues_workers": origin.continues_workers,
            },
            "set_epochs": dict(self.set_epochs or {}),
            "source": dict(self.source or {}),
            "source_state": self.source_state,
        }

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> "Progress":
        """Read what :meth:`to_state` wrote, in this version or in version 1.

        Raises:
            StateError: It was written by another version, or is something else.
        """
        if not isinstance(state, Mapping):
            came = "None" if state is None else type(state).__name__
            raise StateError(
                "expected a state as state_dict() of a StreamPrefetchLoader gives it, "
                f"got {came}. Pass that dict; where none was saved, leave "
                "load_state_dict() out."
            )
        version = state.get("version")
        if version == 1:
            state = _upgrade(state)
        elif version != _VERSION:
            advice = _find_state(state) or "Save it again with the version in use."
            raise StateError(
                f"expected a state of version {_VERSION} or 1 as state_dict() of a "
                f"StreamPrefetchLoader gives it, got version {version!r} in a "
                f"{type(state).__name__} with the entries {_names(state)}. {advice}"
            )
        _check_entries(state, _ENTRIES, _VERSION)
        _check_values(state)
        fields = {key: state[key] for key in state if key != "version"}
        if fields["origin"] is not None:
            fields["origin"] = Origin(**fields["origin"])
        return Progress(**fields, is_loaded=True)


def _check_entries(
    state: Mapping[str, Any], expected: Collection[str], version: int
) -> None:
    if state.keys() != set(expected):
        advice = _find_state(state) or "Pass what state_dict() gave, unchanged."
        raise StateError(
            f"a state of version {version} has the entries {sorted(expected)}, "
            f"got {_names(state)}. {advice}"
        )


def _names(state: Mapping[str, Any]) -> list[str]:
    """List entries for people; a model's own state has thousands."""
    names = sorted(map(str, state))
    return names if len(names) <= _MOST_NAMED else [*names[:_MOST_NAMED], "..."]


def _find_state(checkpoint: Mapping[str, Any]) -> str:
    """Ask for the entry of a checkpoint that is a state of ours; empty if none is."""
    for key, value in checkpoint.items():
        if isinstance(value, Mapping) and value.keys() in (_ENTRIES, _ENTRIES_1):
            return f"Did you mean load_state_dict(checkpoint[{key!r}])?"
    return ""


_VALUES: dict[str, type | UnionType] = {
    "epoch": int,
    "yielded": int,
    "seed": int | None,
    "base_seed": int | None,
    "is_started": bool,
    "origin": Mapping | None,
    "set_epochs": Mapping,
    "source": Mapping,
}
_VALUES_OF_ORIGIN: dict[str, type | UnionType] = {
    "generators": Mapping,
    "continues_workers": bool,
}


def _check_values(state: Mapping[str, Any]) -> None:
    origin = state["origin"]
    in_origin = {} if origin is None else _VALUES_OF_ORIGIN
    for entries, expected in ((state, _VALUES), (origin, in_origin)):
        for name, kind in expected.items():
            value: Any = entries.get(name)
            is_right = isinstance(value, kind)
            if not is_right or (name in ("epoch", "yielded") and value < 0):
                raise StateError(
                    f"the state's entry {name!r} is {str(value)[:40]!r}, and not what "
                    "state_dict() gives. Pass its result unchanged."
                )


_ENTRIES = Progress().to_state().keys()

# Version 1 kept torch's generator alone, as a tensor, and nothing about the source.
_ENTRIES_1 = (_ENTRIES | {"generator_state"}) - {
    "is_started",
    "origin",
    "set_epochs",
    "source",
}


def _upgrade(state: Mapping[str, Any]) -> dict[str, Any]:
    _check_entries(state, _ENTRIES_1, 1)
    new = {**Progress().to_state(), **state, "version": _VERSION}
    saved = new.pop("generator_state")
    if saved is not None:
        new["is_started"] = True
        text = base64.b64encode(saved.cpu().numpy().tobytes()).decode()
        new["origin"] = {"generators": {"torch": text}, "continues_workers": False}
    return new
