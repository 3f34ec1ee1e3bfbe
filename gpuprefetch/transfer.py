"""How does a prepared batch get onto the device, through the transform, to the loop?

:class:`StreamTransfer` issues copies and transforms on the side stream and hands each
batch over to the loop's stream (see [Note: Hand-off] in ``streams``). All of it is
issued by the loop's own thread, so the device, grad mode and generators of that thread
apply and a graph capture of the loop is never disturbed by another one.
:class:`InlineTransfer` does the same work at once, where nothing can run beside the
loop.
"""

from typing import Any, Protocol

import torch

from gpuprefetch import streams
from gpuprefetch.batch import leaves_of, map_leaves
from gpuprefetch.batch_copy import BatchCopy
from gpuprefetch.copies import Copies
from gpuprefetch.entry import Entry, InFlight, Prepared, as_batch_error
from gpuprefetch.host_lead import HostLead
from gpuprefetch.meter import Meter
from gpuprefetch.move import move_leaf, num_bytes_of
from gpuprefetch.scope import transform_modes
from gpuprefetch.staging import SlotRing
from gpuprefetch.streams import SideStream
from gpuprefetch.transform import Applies

__all__ = ["InlineTransfer", "StreamTransfer", "Transfer"]

# Whose fault a StopIteration from the middle of the issuing is.
_USER_CODE = "the transform, or an object's own to(),"


class Transfer(Protocol):
    """What a pass needs of either kind."""

    depth: int
    """Most batches that may be issued and not yet yielded."""

    def enqueue(self, entry: Entry, batch_index: int) -> InFlight:
        """Issue the copy and the transform of one batch."""

    def hand_off(self, in_flight: InFlight) -> Any:
        """Give the batch to the stream that is current now; does not block."""

    def wait_before_step(self) -> None:
        """Do what is due when the loop asks for a batch; may block the host."""

    def wait_before_pull(self) -> None:
        """Make sure that the source, or a feeder that waits, can go on; may block."""

    @property
    def copies(self) -> Copies | None:
        """The copies under way, which the end of the pass waits for."""


class InlineTransfer:
    """Moves and transforms a batch at once; for the CPU, MPS and meta devices.

    Args:
        device: Where batches go.
        transform: What is done to them there, if anything.
        meter: Told how long the transform takes.
    """

    depth = 1

    def __init__(
        self, device: torch.device, transform: Applies | None, meter: Meter
    ) -> None:
        self._device = device
        self._transform = transform
        self._meter = meter
        self._modes = transform_modes(device)

    def enqueue(self, entry: Entry, batch_index: int) -> InFlight:
        """Move and transform one batch."""
        if entry.prepared is None:
            return _end_of_source(entry)
        try:
            with self._modes:
                batch = self._move_batch(entry.prepared.batch_host)
                if self._transform is not None:
                    with self._meter.transforming:
                        batch = self._transform.apply(batch, batch_index)
        except Exception as error:
            # Into no variable: the traceback refers to this frame.
            return InFlight(
                source_state=entry.source_state,
                error=as_batch_error(error, _USER_CODE),
            )
        return InFlight(batch, source_state=entry.source_state)

    def _move_batch(self, batch: object) -> object:
        def move(leaf: object) -> object:
            moved = move_leaf(
                leaf, batch=batch, device=self._device, non_blocking=False
            )
            if moved is not leaf:
                self._meter.copied_bytes += num_bytes_of(moved)
            return moved

        return map_leaves(batch, move)

    def hand_off(self, in_flight: InFlight) -> object:
        """Return the batch, which is ready."""
        return in_flight.batch_device

    def wait_before_step(self) -> None:
        """Nothing is under way."""

    def wait_before_pull(self) -> None:
        """Nothing is under way."""

    @property
    def copies(self) -> Copies | None:
        """Nothing is under way."""
        return None


def _end_of_source(entry: Entry) -> InFlight:
    return InFlight(source_state=entry.source_state, error=entry.error, is_last=True)


class StreamTransfer:
    """Issues copies and transforms on a side stream.

    Args:
        side: The loader's side stream.
        transform: What is done to batches on the device, if anything.
        ring: Where the slots of staged batches go back to.
        depth: Most batches in flight.
        waits_for_source: This thread pulls the source, which may write into the memory
            of the batch before: then no copy from it may be under way.
        meter: Told how long each stage takes, on the host and on the device.
    """

    def __init__(
        self,
        side: SideStream,
        *,
        transform: Applies | None,
        ring: SlotRing,
        depth: int,
        waits_for_source: bool,
        meter: Meter,
    ) -> None:
        self.depth = depth
        self._side = side
        self._transform = transform
        self._waits_for_source = waits_for_source
        self._meter = meter
        self.copies = Copies(ring, side)
        # The batch that is being issued; stays set when Ctrl-C comes in the middle.
        self._issuing: Prepared | None = None
        self._host_lead = HostLead(depth, side.device)
        self._on_side = side.entered()
        self._modes = transform_modes(side.device)
        # What the loop has queued until now, such as the weights of an encoder that is
        # the transform, comes before this pass.
        side.enqueue_wait_for(streams.current_stream(side.device))

    # Issue #

    def enqueue(self, entry: Entry, batch_index: int) -> InFlight:
        """Issue the copy and the transform of one batch and return at once."""
        if entry.prepared is None:
            return _end_of_source(entry)
        self._issuing = entry.prepared
        try:
            in_flight = self._issue(entry.prepared, batch_index)
        except Exception as error:
            in_flight = InFlight(error=as_batch_error(error, _USER_CODE))
        self._issuing = None
        in_flight.source_state = entry.source_state
        return in_flight

    def _issue(self, prepared: Prepared, batch_index: int) -> InFlight:
        with self._on_side as consumer, self._modes:
            is_timed = self._meter.begin_copy(self._side)
            with self._meter.copying:
                batch, holds_source = self._enqueue_copies(prepared, consumer)
            if is_timed:
                self._meter.end_copy(self._side)
            if self._transform is not None:
                with self._meter.transforming:
                    batch = self._transform.apply(batch, batch_index)
                if is_timed:
                    self._meter.end_transform(self._side)
            ready = self._side.record_event()
        return InFlight(batch, ready, holds_source=holds_source)

    def _enqueue_copies(
        self, prepared: Prepared, consumer: streams.Stream
    ) -> tuple[object, bool]:
        """Issue the copies.

        Returns:
            The batch, and whether the source may still write into a part of it.
        """
        if prepared.slot is not None:
            prepared.slot.pin()
        copy = BatchCopy(self._side, prepared, consumer)
        try:
            batch = map_leaves(prepared.batch_host, copy.enqueue_leaf)
        finally:
            # Also when a leaf failed: what was issued before it still runs.
            copied = self._side.record_event()
            self.copies.add(copied, prepared, reads_source=copy.reads_source)
            self._meter.copied_bytes += copy.num_bytes
        return batch, copy.adopted and self._waits_for_source

    # Hand-off #

    def hand_off(self, in_flight: InFlight) -> object:
        """Make the batch usable on the stream that is current now.

        See [Note: Hand-off]; every tensor at any depth is recorded.
        """
        if in_flight.ready is not None:
            consumer = streams.enqueue_wait(in_flight.ready, self._side.device)
            self._side.take_back(in_flight.ready)
            if self._meter.is_looking:
                self._meter.end_stall(consumer)
            for leaf in leaves_of(in_flight.batch_device):
                streams.record_use(leaf, consumer)
            self._host_lead.enqueue_step_event(consumer)
        return in_flight.batch_device

    # Host memory #

    def wait_before_step(self) -> None:
        """Keep the host's lead in bounds, and free the slots that were copied."""
        self._host_lead.wait_in_bounds(self._meter.waiting_for_device)
        self.copies.free_finished(but=self._issuing)

    def wait_before_pull(self) -> None:
        """Make sure that the source, or the feeder, can go on.

        A source that refills its buffers is pulled again only after the copies from
        them. Before a blocking wait every slot is freed that can be: a feeder may be
        waiting for one, and only this thread frees them.
        """
        may_refill = self._waits_for_source
        if self.copies.are_in_the_way(may_refill=may_refill):
            with self._meter.waiting_for_device:
                self.copies.wait_for_source_and_slot(
                    may_refill=may_refill, but=self._issuing
                )
