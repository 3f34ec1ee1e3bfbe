"""How does one pass over the source run?

A *pass* is one run over the source; an *epoch* is its number. A pass that was broken
off keeps its number, the next one has another.

[Note: Flow]
Each ``next`` first issues batches to the device until ``depth`` of them are in
flight, then hands off the oldest. Only the oldest is waited for; further ones are
issued if the feeder has them ready. So with depth 2 the copy and the transform of batch
n+1 are queued on the side stream before the loop starts the step of batch n.

Invariants: batches are yielded in the source's order, each once. An error waits for its
own batch's turn; after it, and after the end, nothing but ``StopIteration`` comes.
"""

import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from gpuprefetch.copies import Copies
from gpuprefetch.entry import Entry, InFlight
from gpuprefetch.errors import SupersededError
from gpuprefetch.feeder import Feeder, ThreadFeeder
from gpuprefetch.meter import Meter
from gpuprefetch.progress import Progress
from gpuprefetch.transfer import Transfer

__all__ = ["Epoch"]

Batch = TypeVar("Batch", covariant=True)


class Epoch(Iterator[Batch], Generic[Batch]):
    """The iterator that ``iter(loader)`` gives.

    Args:
        feeder: Where batches come from; closed with the pass.
        transfer: How they reach the device.
        progress: Told of each yielded batch, until another pass takes it over.
        meter: Told what happens, and when.
        on_end: Called once, after the pass has ended and nothing runs any more.
    """

    def __init__(
        self,
        *,
        feeder: Feeder,
        transfer: Transfer,
        progress: Progress,
        meter: Meter,
        on_end: Callable[[], None],
    ) -> None:
        self._feeder = feeder
        self._transfer = transfer
        self._progress = progress
        self._meter = meter
        # Issued and not yet yielded, oldest first; at most `transfer.depth`.
        self._in_flight: deque[InFlight] = deque()
        # Taken from the feeder and not issued yet: kept, so that Ctrl-C in the middle
        # of issuing loses no batch.
        self._pending: Entry | None = None
        # Of the next batch to issue, counted from 0 in the epoch; seeds come from it.
        self._next_index = progress.yielded
        self._is_source_done = False
        self._is_closed = False
        self._is_superseded = False
        # Runs at the latest when this object is collected, as after a `break`.
        # It refers to nothing that may lead back to this pass by way of the user's
        # transform, or of a source that this thread pulls: it would never be collected.
        self._finalizer = weakref.finalize(
            self,
            _shut_down,
            os.getpid(),
            feeder if isinstance(feeder, ThreadFeeder) else None,
            transfer.copies,
            self._in_flight,
            on_end,
        )
        # Threads have their own way to end at interpreter exit; nothing else runs.
        self._finalizer.atexit = False

    def __iter__(self) -> "Epoch[Batch]":
        return self

    def __next__(self) -> Batch:
        if self._is_closed:
            raise self._why_closed()
        self._meter.begin_next(len(self._in_flight) + self._feeder.num_ready)
        self._transfer.wait_before_step()
        self._fill()
        if self._is_closed:  # By a signal handler, meanwhile.
            raise self._why_closed()
        if self._meter.is_looking:
            self._meter.note_in_flight(self._in_flight)
        batch = self._yield_oldest()
        self._meter.end_next()
        return batch

    def _why_closed(self) -> Exception:
        if self._is_superseded:
            return SupersededError(
                "a newer pass over this loader has started, and its source has one "
                "iterator for all passes (persistent workers, a one-shot iterator, or "
                "a source that keeps a state). Finish one pass before the next."
            )
        return StopIteration()

    # Flow #

    def _fill(self) -> None:
        """Issue batches until enough are in flight or none is ready; [Note: Flow]."""
        while not self._is_source_done and len(self._in_flight) < self._transfer.depth:
            if self._in_flight and self._in_flight[-1].holds_source:
                return
            if self._pending is None:
                self._pending = self._take(may_wait=not self._in_flight)
            if self._is_closed:  # While the source was at work.
                raise self._why_closed()
            if self._pending is None:
                return
            in_flight = self._transfer.enqueue(self._pending, self._next_index)
            if self._is_closed:  # By the transform, or by a signal handler.
                raise self._why_closed()
            self._in_flight.append(in_flight)
            self._is_source_done = in_flight.is_last
            self._pending.error = None  # Now carried by `in_flight` alone.
            self._pending = None
            self._next_index += 1

    def _take(self, *, may_wait: bool) -> Entry | None:
        feeder = self._feeder
        if feeder.is_inline:
            # The source's code runs, and a slot is filled, before `take` returns.
            self._transfer.wait_before_pull()
            with self._meter.pulling:
                return feeder.take(may_wait=may_wait)
        if may_wait:
            self._transfer.wait_before_pull()
            if not feeder.num_ready:
                with self._meter.waiting_for_source:
                    return feeder.take(may_wait=True)
        return feeder.take(may_wait=may_wait)

    def _yield_oldest(self) -> Batch:
        oldest = self._in_flight.popleft()
        self._raise_if_over(oldest)
        try:
            with self._meter.handing_off:
                batch: Batch = self._transfer.hand_off(oldest)
        except Exception:
            # From an object's own record_stream(): no batch, so the pass is over.
            self.close()
            raise
        self._feeder.note_yielded()
        self._progress.source_state = oldest.source_state
        self._progress.yielded += 1
        return batch

    def _raise_if_over(self, oldest: InFlight) -> None:
        """End the pass where the source ended, or something failed."""
        error, oldest.error = oldest.error, None
        if error is not None:
            self.close()
            try:
                raise error
            finally:
                # The traceback refers to this frame.
                del error
        if oldest.is_last:
            self._progress.source_state = oldest.source_state
            self._progress.finish_pass()
            self.close()
            self._meter.end_pass()
            raise StopIteration

    # End #

    def close(self) -> None:
        """End the pass: stop the thread, drop batches in flight. Safe to call twice."""
        self._is_closed = True
        self._pending = None
        self._finalizer()
        self._feeder.drop_iterator()

    def supersede(self) -> None:
        """End the pass because another one took over the source's iterator."""
        if not self._is_closed:
            self._is_superseded = True
            self.close()


def _shut_down(
    owner_pid: int,
    feeder: ThreadFeeder | None,
    copies: Copies | None,
    in_flight: deque[InFlight],
    on_end: Callable[[], None],
) -> None:
    """Stop what a pass started, in the order in which one uses the other."""
    in_flight.clear()
    if os.getpid() != owner_pid:
        # A forked child: thread, workers and device are the parent's.
        return
    try:
        if feeder is not None:
            feeder.stop()
    finally:
        try:
            if copies is not None:
                copies.wait_all()
        finally:
            # Only now: the copies may read memory that the iterator owns.
            if feeder is not None:
                feeder.drop_iterator()
            on_end()
