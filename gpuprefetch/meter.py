"""Who counts and times what a pass does?

A stage is timed with ``with meter.copying:``, which also shows it to a profiler.
Nothing here waits for the device: timing events are asked whether they are done, and
read then; see [Note: Which batches count]. What the clock showed is counted later; see
[Note: Readings] in ``times``.

What a pass calls at each batch does next to nothing at most of them: all that can wait
is done at every eighth, in :meth:`Meter._look`.

Threads: ``note_pull`` and ``pinning`` belong to the thread that pulls the source, but
for the histogram of the latter, which the loop sets once; ``snapshot`` to any, all else
to the loop's. Memory is bounded, however long a pass is.
"""

from collections import deque
from collections.abc import Callable, Iterable
from threading import Lock
from time import perf_counter
from typing import Any

import torch

from gpuprefetch import ranges, streams
from gpuprefetch.batch import leaves_of
from gpuprefetch.entry import InFlight
from gpuprefetch.move import num_bytes_of
from gpuprefetch.stages import Shown, Stage
from gpuprefetch.stats import LoaderStats
from gpuprefetch.streams import SideStream, Stream, TimingEvent
from gpuprefetch.times import Reading, Times

__all__ = ["Meter"]

# [Note: Which batches count]: enough for a verdict early on, then one in so many.
_ALL_UP_TO = 32
_ONE_IN = 8

# Measurements whose events have not fired yet: the host is never so many steps ahead.
_MOST_PENDING = 64

# Readings of the clock that are counted together, three a batch. The oldest are dropped
# where more have piled up: Ctrl-C may have come between a lock and its release.
_READINGS_AT_ONCE = 128
_MOST_READINGS = 16 * _READINGS_AT_ONCE

# Batches after which what they showed is looked at, once.
_FIRST_BATCHES = 32


class Meter:
    """What one pass did so far.

    Args:
        epoch: Number of the pass.
        device: Where batches go.
        on_first_batches: Gives what is called once, with the meter: after 32 batches,
            or at the end of a shorter pass. A weak reference, since the thread that
            pulls the source holds the meter.
    """

    def __init__(
        self,
        epoch: int = 0,
        device: torch.device | None = None,
        on_first_batches: Callable[[], Callable[["Meter"], None] | None] | None = None,
    ) -> None:
        self.epoch = epoch
        self.device = device
        self.yielded = 0
        self.copied_bytes = 0
        """Bytes of dense tensors issued to the device; added to by the transfer."""
        self.is_threaded = False
        """A thread pulls the source; set before the first batch."""
        self.is_looking = False
        """The loop's ``next`` is the first, or one that has timing events: to be asked
        before :meth:`note_in_flight` and :meth:`end_stall`."""
        self.is_over = False
        """The pass has ended, in whichever way."""
        self._on_first_batches = on_first_batches
        self._times = Times()
        # Written by the loop and by the thread that pulls the source, counted and
        # dropped by whoever holds the lock: the loop, or one that asks for figures.
        self._readings: deque[Reading] = deque(maxlen=_MOST_READINGS)
        self._counting = Lock()
        self._device_bytes = 0
        # Stages #
        self.pinning = Stage(ranges.PIN)
        self.waiting_for_source = Stage(ranges.WAIT)
        # The same where the loop's thread pulls, which `note_pull` times.
        self.pulling = Shown(ranges.WAIT)
        self.waiting_for_device = Stage("")
        self.copying = Shown(ranges.COPY)
        self.transforming = Stage(ranges.TRANSFORM)
        self.handing_off = Shown(ranges.HAND_OFF)
        # On the device #
        self._issued = 0
        self._num_dry = self._num_asked = 0
        self._stall_begun: TimingEvent | None = None
        self._copy: _TimedCopy | None = None
        # Recorded, oldest first; taken out when their last event has fired.
        self._pending: deque[_TimedCopy | _TimedStall] = deque()
        # Held by whoever takes from there: the loop, or a thread that asks for figures.
        self._reading = Lock()
        # Fired, to be recorded again: making an event takes longer.
        self._spare: list[TimingEvent] = []

    # A batch #

    def begin_next(self, queued: int) -> None:
        """The loop asks for a batch, while ``queued`` are in hand."""
        self._readings.append((perf_counter(), queued))
        yielded = self.yielded
        self.is_looking = not yielded
        # Written out, here and in `begin_copy`: a call would be made at each batch.
        if yielded < _ALL_UP_TO or yielded % _ONE_IN == 0:
            self._look()

    def _look(self) -> None:
        """Count, read and measure what is due; see [Note: Which batches count]."""
        # Before the batch and not after it, so that it is a part of `loader_ms`.
        if len(self._readings) >= _READINGS_AT_ONCE:
            self._count_readings()
        self._stall_begun = None
        if self._pending:
            self._read_fired()
        if self.yielded and self._issued and len(self._pending) < _MOST_PENDING:
            self._begin_stall()

    def end_next(self) -> None:
        """The loop gets its batch."""
        self._readings.append(
            (
                perf_counter(),
                self.waiting_for_source.total_s,
                self.waiting_for_device.total_s,
                self.transforming.total_s,
                self.pinning.total_s,
            )
        )
        self.yielded = yielded = self.yielded + 1
        if yielded == _FIRST_BATCHES:
            self._look_at_first_batches()
        elif yielded == 1 and self.is_threaded:
            self.pinning.times_ms = self._times.pin_ms

    def note_pull(self, seconds: float, *, is_batch: bool = True) -> None:
        """The source gave a batch after that time, or else ended or failed."""
        if not self.is_threaded:
            self.waiting_for_source.total_s += seconds
        if is_batch and self.yielded:
            self._readings.append(seconds)

    def end_pass(self) -> None:
        """The source ended; there is no further batch."""
        if self.yielded < _FIRST_BATCHES:
            self._look_at_first_batches()

    def _look_at_first_batches(self) -> None:
        reference, self._on_first_batches = self._on_first_batches, None
        look = None if reference is None else reference()
        if look is not None:
            look(self)

    # On the device #

    def begin_copy(self, side: SideStream) -> bool:
        """Copies are about to be issued on the side stream.

        Returns:
            Whether :meth:`end_copy` and :meth:`end_transform` are to be called.
        """
        place, self._issued = self._issued, self._issued + 1
        if place >= _ALL_UP_TO and place % _ONE_IN:
            return False
        # Not of those before the first is yielded: they load kernels and choose
        # algorithms.
        if not self.yielded or len(self._pending) >= _MOST_PENDING:
            return False
        begun = side.record_timing(self._spare)
        self._copy = _TimedCopy(begun, -self.copied_bytes)
        return True

    def end_copy(self, side: SideStream) -> None:
        """The copies have been issued, and counted in ``copied_bytes``."""
        assert self._copy is not None
        self._copy.num_bytes += self.copied_bytes
        self._copy.copied = side.record_timing(self._spare)
        self._pending.append(self._copy)

    def end_transform(self, side: SideStream) -> None:
        """The transform has been issued."""
        assert self._copy is not None
        self._copy.transformed = side.record_timing(self._spare)

    def _begin_stall(self) -> None:
        assert self.device is not None
        consumer = streams.current_stream(self.device)
        self._num_asked += 1
        self._num_dry += consumer.query()
        self._stall_begun = streams.record_timing(consumer, self.device, self._spare)
        self.is_looking = True

    def end_stall(self, consumer: Stream) -> None:
        """The loop's stream has been told to wait for the batch."""
        begun, self._stall_begun = self._stall_begun, None
        if begun is not None:
            assert self.device is not None
            ended = streams.record_timing(consumer, self.device, self._spare)
            self._pending.append(_TimedStall(begun, ended))

    def note_in_flight(self, in_flight: Iterable[InFlight]) -> None:
        """See how large the batches in flight are, for a sample of the batches."""
        if self._issued:
            num_bytes = sum(
                num_bytes_of(leaf)
                for one in in_flight
                for leaf in leaves_of(one.batch_device)
            )
            self._device_bytes = max(self._device_bytes, num_bytes)

    def _read_fired(self) -> None:
        if not self._reading.acquire(blocking=False):
            return  # Somebody is at it.
        try:
            while self._pending and self._pending[0].has_fired():
                timed = self._pending.popleft()
                timed.read_into(self._times)
                self._spare += timed.events()
        finally:
            self._reading.release()

    def _count_readings(self) -> None:
        if not self._counting.acquire(blocking=False):
            return  # Somebody is at it, or this is a handler that interrupted them.
        try:
            self._times.take(self._readings, is_threaded=self.is_threaded)
        finally:
            self._counting.release()

    # The record #

    def snapshot(self) -> LoaderStats:
        """Freeze the figures; the fields about the loader are left as they are."""
        self._count_readings()
        self._read_fired()
        spreads: dict[str, Any] = dict(self._times.spreads())
        return LoaderStats(
            epoch=self.epoch,
            batches=self.yielded,
            copied_bytes=self.copied_bytes,
            first_ms=self._times.first_s * 1e3,
            dry_share=self._num_dry / max(self._num_asked, 1),
            device_bytes=self._device_bytes,
            device="" if self.device is None else str(self.device),
            is_threaded=self.is_threaded,
            **spreads,
        )


class _TimedCopy:
    """Timing events of one batch on the side stream, in the order of recording."""

    __slots__ = ("begun", "copied", "num_bytes", "transformed")

    def __init__(self, begun: TimingEvent, num_bytes: int) -> None:
        self.begun = begun
        self.copied = begun
        self.transformed: TimingEvent | None = None
        self.num_bytes = num_bytes

    def events(self) -> list[TimingEvent]:
        newest = [] if self.transformed is None else [self.transformed]
        return [self.begun, self.copied, *newest]

    def has_fired(self) -> bool:
        return (self.transformed or self.copied).query()

    def read_into(self, times: Times) -> None:
        copy_ms = self.begun.elapsed_time(self.copied)
        if self.num_bytes:
            times.copy_ms.add(copy_ms)
            times.copy_gb_per_s.add(self.num_bytes / max(copy_ms, 1e-4) / 1e6)
        if self.transformed is not None:
            times.transform_ms.add(self.copied.elapsed_time(self.transformed))


class _TimedStall:
    """Timing events of one batch on the loop's stream."""

    __slots__ = ("begun", "ended")

    def __init__(self, begun: TimingEvent, ended: TimingEvent) -> None:
        self.begun = begun
        self.ended = ended

    def events(self) -> list[TimingEvent]:
        return [self.begun, self.ended]

    def has_fired(self) -> bool:
        # Both, since the loop may have changed its stream between them.
        return self.ended.query() and self.begun.query()

    def read_into(self, times: Times) -> None:
        times.stall_ms.add(self.begun.elapsed_time(self.ended))
