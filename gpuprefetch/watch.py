"""Who tells the user, once, of what costs time and raises no error?

A :class:`Watch` belongs to a loader. It looks at the transform when a pass starts, at
the first batch, at the host synchronizations of a few early calls of the transform, and
at the figures after 32 batches. What it finds goes to the log, once for a loader, and
stays in ``stats().notes``.

It refers to no batch, no transform and no pass: the feeder's thread knows it.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from gpuprefetch import findings
from gpuprefetch.batch import path_to
from gpuprefetch.entry import Prepared
from gpuprefetch.errors import SelectionError
from gpuprefetch.findings import Finding
from gpuprefetch.selection import Selection
from gpuprefetch.stats import LoaderStats
from gpuprefetch.streams import is_asynchronous
from gpuprefetch.syncs import syncs_noted
from gpuprefetch.transform import Applies

__all__ = ["Watch"]

_logger = logging.getLogger("gpuprefetch.advice")

_SILENCE = "logging.getLogger('gpuprefetch.advice').setLevel(logging.ERROR) silences"

# Calls of the transform that are looked at. Not the first: libraries that load and
# kernels that are chosen wait for the device once.
_CALLS_LOOKED_AT = (1, 2)


class Watch:
    """What one loader has told its user."""

    def __init__(self) -> None:
        self._told: dict[str, str] = {}
        self._seen: set[str] = set()
        self._pageable_path = ""
        self._num_calls = 0

    @property
    def notes(self) -> tuple[str, ...]:
        """All that was found so far, in the order in which it was."""
        return tuple(self._told.values())

    def tell(self, found: Iterable[Finding]) -> None:
        """Log what has not been told yet."""
        for finding in found:
            if finding.key not in self._told:
                self._told[finding.key] = finding.text
                _logger.warning("%s (%s this.)", finding.text, _SILENCE)

    def look_at_function(
        self, function: Callable[..., Any] | None, device: torch.device
    ) -> None:
        """Look at the transform as a pass starts."""
        if function is not None and is_asynchronous(device):
            self.tell(findings.in_function(function, device))

    def looking_at_the_first(
        self, prepare: Callable[[Any], Prepared], *, is_source_pinning: bool
    ) -> Callable[[Any], Prepared]:
        """Let the first batch of all be looked at before it is prepared.

        Args:
            prepare: What is done to each batch in host memory.
            is_source_pinning: The source was asked to pin its batches.
        """

        def look(batch: Any) -> None:
            leaf = findings.pageable_leaf(batch)
            self._pageable_path = "" if leaf is None else path_to(batch, leaf)
            self.tell(findings.in_batch(batch, is_source_pinning=is_source_pinning))

        return self._looking_once("batch", look, prepare)

    def looking_at_images(
        self, prepare: Callable[[Any], Prepared], selection: Selection
    ) -> Callable[[Any], Prepared]:
        """Let the images of the first batch of all be looked at, on any device.

        Args:
            prepare: What is done to each batch in host memory.
            selection: What a Kornia augmentation gets of a batch.
        """

        def look(batch: Any) -> None:
            # A batch without them is refused when it is the transform's turn.
            with suppress(SelectionError):
                self.tell(findings.in_images(selection.take(batch), batch))

        return self._looking_once("images", look, prepare)

    def _looking_once(
        self, what: str, look: Callable[[Any], None], prepare: Callable[[Any], Prepared]
    ) -> Callable[[Any], Prepared]:
        def look_and_prepare(batch: Any) -> Prepared:
            if what not in self._seen:
                self._seen.add(what)
                look(batch)
            return prepare(batch)

        return prepare if what in self._seen else look_and_prepare

    def look_at_figures(self, stats: LoaderStats) -> None:
        """Look at what the first batches of a pass took."""
        self.tell(findings.in_figures(stats, self._pageable_path))

    def looking_at(self, transform: Applies, device: torch.device) -> Applies:
        """Let the first calls of a transform be looked at.

        Args:
            transform: What is applied to each batch.
            device: Where.
        """
        if self._num_calls > _CALLS_LOOKED_AT[-1]:
            return transform
        return _LookedAt(transform, self, device)

    @contextmanager
    def looking_for_syncs(self, device: torch.device) -> Iterator[None]:
        """Look at what a call of the transform makes the host wait for."""
        self._num_calls += 1
        if self._num_calls - 1 not in _CALLS_LOOKED_AT:
            yield
            return
        with syncs_noted(device) as places:
            yield
        self.tell(findings.in_syncs(places))


class _LookedAt:
    """A transform some of whose calls are looked at."""

    def __init__(self, transform: Applies, watch: Watch, device: torch.device) -> None:
        self._transform = transform
        self._watch = watch
        self._device = device
        self._num_calls = 0

    def apply(self, batch: Any, batch_index: int) -> Any:
        self._num_calls += 1
        if self._num_calls > _CALLS_LOOKED_AT[-1] + 1:
            return self._transform.apply(batch, batch_index)
        with self._watch.looking_for_syncs(self._device):
            return self._transform.apply(batch, batch_index)
