"""How does a prepared batch get onto the device, through the transform, to the loop?

:class:`StreamTransfer` issues copies and transforms on the side stream and hands each
batch over to the loop's stream (see [Note: Hand-off] in ``streams``). All of it is
issued by the loop's own thread, so the device, grad mode and generators of that thread
apply and a graph capture of the loop is never disturbed by another one.
:class:`InlineTransfer` does the same work at once, where nothing can run beside the
loop.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from gpuprefetch import streams
from gpuprefetch.batch import leaves_of, map_leaves, tensors_within
from gpuprefetch.containers import has_own_to
from gpuprefetch.errors import as_batch_error
from gpuprefetch.feeder import Entry, Prepared
from gpuprefetch.move import move_leaf, wrap_like
from gpuprefetch.scope import transform_modes
from gpuprefetch.staging import SlotRing, StagedLeaf, tensor_in
from gpuprefetch.streams import Event, SideStream
from gpuprefetch.transforming import DeviceStep

__all__ = ["InFlight", "InlineTransfer", "StreamTransfer", "Transfer"]


@dataclass(frozen=True, slots=True)
class InFlight:
    """A batch that was issued to the device and not yielded yet."""

    entry: Entry
    """What it was made from, without the host's copy of the batch."""
    batch_device: Any = None
    """Not to be read by the loop before the hand-off."""
    ready: Event | None = None
    """Recorded on the side stream after the transform; the hand-off waits for it."""
    error: BaseException | None = None
    """What the source, the copy or the transform raised for this batch."""


class Transfer(Protocol):
    """What a pass needs of either kind."""

    depth: int
    """Most batches that may be issued and not yet yielded."""
    copied_bytes: int
    """Bytes issued to the device so far in this pass."""

    def enqueue(self, entry: Entry, batch_index: int) -> InFlight:
        """Issue the copy and the transform of one batch."""

    def hand_off(self, in_flight: InFlight) -> Any:
        """Give the batch to the stream that is current now."""

    def before_step(self) -> None:
        """Do what is due each time the loop asks for a batch."""

    def before_pull(self, *, may_block: bool) -> None:
        """Make sure that the source may be pulled."""

    def close(self) -> None:
        """Wait for copies under way; nothing reads host memory afterwards."""


class InlineTransfer:
    """Moves and transforms a batch at once; for the CPU, MPS and meta devices.

    Args:
        device: Where batches go.
        step: The transform, if there is one.
    """

    depth = 1

    def __init__(self, device: torch.device, step: DeviceStep | None) -> None:
        self._device = device
        self._step = step
        self.copied_bytes = 0

    def enqueue(self, entry: Entry, batch_index: int) -> InFlight:
        """Move and transform one batch."""
        if entry.prepared is None:
            return InFlight(entry, error=entry.error)
        bare_entry = Entry(Prepared(None), entry.source_state)
        try:
            with transform_modes(self._device):
                batch = self._move_batch(entry.prepared.batch_host)
                if self._step is not None:
                    batch = self._step.apply(batch, batch_index)
        except Exception as error:
            return InFlight(bare_entry, error=as_batch_error(error, "the transform"))
        return InFlight(bare_entry, batch)

    def _move_batch(self, batch: Any) -> Any:
        def move(leaf: Any) -> Any:
            moved = move_leaf(
                leaf, batch=batch, device=self._device, non_blocking=False
            )
            if moved is not leaf and isinstance(moved, torch.Tensor):
                self.copied_bytes += _num_bytes(moved)
            return moved

        return map_leaves(batch, move)

    def hand_off(self, in_flight: InFlight) -> Any:
        """Return the batch, which is ready."""
        return in_flight.batch_device

    def before_step(self) -> None:
        """Nothing is under way."""

    def before_pull(self, *, may_block: bool) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        """Nothing is under way."""


def _num_bytes(leaf: torch.Tensor) -> int:
    """Count the bytes of a dense leaf; other layouts are not counted."""
    return leaf.nbytes if leaf.layout is torch.strided else 0


@dataclass(frozen=True, slots=True)
class _Copying:
    """Copies of one batch that may still read host memory."""

    copied: Event
    """Recorded on the side stream after the copies of the batch."""
    prepared: Prepared
    """Keeps the source's pinned leaves alive, and names the slot to free."""
    reads_source: bool
    """Some leaf is copied from the source's own memory, not from the slot."""


class StreamTransfer:
    """Issues copies and transforms on a side stream.

    Args:
        side: The loader's side stream.
        step: The transform, if there is one.
        ring: Where the slots of staged batches go back to.
        depth: Most batches in flight.
        may_refill: The source may write into the memory of the batch it gave, once it
            is pulled again, and is pulled by this thread.
    """

    def __init__(
        self,
        side: SideStream,
        *,
        step: DeviceStep | None,
        ring: SlotRing,
        depth: int,
        may_refill: bool,
    ) -> None:
        self.depth = depth
        self.copied_bytes = 0
        self._side = side
        self._step = step
        self._ring = ring
        self._may_refill = may_refill
        self._copying: deque[_Copying] = deque()
        self._host_lead = streams.HostLead(depth, side.device)
        # What the loop has queued until now, such as the weights of an encoder that is
        # the transform, comes before this pass.
        side.wait_for(streams.current_stream(side.device))

    # Issue #

    def enqueue(self, entry: Entry, batch_index: int) -> InFlight:
        """Issue the copy and the transform of one batch and return at once."""
        if entry.prepared is None:
            return InFlight(entry, error=entry.error)
        bare_entry = Entry(Prepared(None), entry.source_state)
        try:
            with self._side, transform_modes(self._side.device):
                batch = self._enqueue_copies(entry.prepared)
                if self._step is None:
                    ready = self._copying[-1].copied
                else:
                    batch = self._step.apply(batch, batch_index)
                    ready = self._side.record_event()
        except Exception as error:
            return InFlight(bare_entry, error=as_batch_error(error, "the transform"))
        return InFlight(bare_entry, batch, ready)

    def _enqueue_copies(self, prepared: Prepared) -> Any:
        if prepared.slot is not None:
            prepared.slot.lock()
        copy = _BatchCopy(self._side, prepared)
        try:
            return map_leaves(prepared.batch_host, copy.enqueue_leaf)
        finally:
            # Also when a leaf failed: what was issued before it still runs.
            self._copying.append(
                _Copying(self._side.record_event(), prepared, copy.reads_source)
            )
            self.copied_bytes += copy.num_bytes

    # Hand-off #

    def hand_off(self, in_flight: InFlight) -> Any:
        """Make the batch usable on the stream that is current now.

        See [Note: Hand-off]; every tensor at any depth is recorded.
        """
        if in_flight.ready is not None:
            consumer = streams.enqueue_wait(in_flight.ready, self._side.device)
            for leaf in leaves_of(in_flight.batch_device):
                streams.record_use(leaf, consumer)
            self._host_lead.note_step(consumer)
        return in_flight.batch_device

    # Host memory #

    def before_step(self) -> None:
        """Free the slots that were copied, and keep the host's lead in bounds."""
        self._host_lead.wait_in_bounds()
        while self._copying and self._copying[0].copied.query():
            self._free(self._copying.popleft())

    def before_pull(self, *, may_block: bool) -> None:
        """Make sure that the source, or the feeder, can go on.

        A source that refills its buffers is pulled again only after the copies from
        them. Before a blocking wait every slot is freed that can be: a feeder may be
        waiting for one, and only this thread frees them.
        """
        if not may_block:
            return
        while self._copying and (not self._ring.has_free or self._reads_source()):
            self._finish_oldest_copy()

    def _reads_source(self) -> bool:
        return self._may_refill and any(copy.reads_source for copy in self._copying)

    def _finish_oldest_copy(self) -> None:
        oldest = self._copying.popleft()
        oldest.copied.synchronize()
        self._free(oldest)

    def _free(self, copied: _Copying) -> None:
        if copied.prepared.slot is not None:
            self._ring.release(copied.prepared.slot)

    def close(self) -> None:
        """Wait for the copies under way, which read slots or the source's memory."""
        while self._copying:
            self._finish_oldest_copy()


class _BatchCopy:
    """The copies of one batch, issued while the side stream is current.

    Args:
        side: The side stream.
        prepared: The batch, and the slot where its staged leaves lie.
    """

    def __init__(self, side: SideStream, prepared: Prepared) -> None:
        self._side = side
        self._prepared = prepared
        self._shared_device: torch.Tensor | None = None
        self._waited_for_consumer = False
        self.num_bytes = 0
        """Bytes of dense tensors issued so far."""
        self.reads_source = False
        """Whether a copy reads the source's own memory."""

    def enqueue_leaf(self, leaf: Any) -> Any:
        """Issue the copy of one leaf; not readable by the loop before the hand-off."""
        kind = type(leaf)
        if kind is StagedLeaf:
            self.num_bytes += leaf.num_bytes
            return wrap_like(self._copy_staged(leaf), leaf.like)
        if kind is torch.Tensor and leaf.is_cpu:
            # What nearly every leaf is; the rest of this asks more than it copies.
            self.reads_source = True
            self.num_bytes += _num_bytes(leaf)
            return leaf.to(self._side.device, non_blocking=True)
        is_tensor = isinstance(leaf, torch.Tensor)
        if is_tensor or has_own_to(leaf):
            self._adopt([leaf] if is_tensor else tensors_within(leaf))
        moved = move_leaf(
            leaf,
            batch=self._prepared.batch_host,
            device=self._side.device,
            non_blocking=True,
        )
        if is_tensor and moved is not leaf:
            self.reads_source = True
            self.num_bytes += _num_bytes(moved)
        elif not is_tensor and has_own_to(leaf):
            self.reads_source = True
        return moved

    def _copy_staged(self, leaf: StagedLeaf) -> torch.Tensor:
        slot = self._prepared.slot
        assert slot is not None
        if leaf.is_shared:
            if self._shared_device is None:
                shared_host = slot.bytes_host[: slot.shared_bytes]
                self._shared_device = shared_host.to(
                    self._side.device, non_blocking=True
                )
            return tensor_in(self._shared_device, leaf, leaf.offset)
        leaf_host = tensor_in(slot.bytes_host, leaf, leaf.offset)
        return leaf_host.to(self._side.device, non_blocking=True)

    def _adopt(self, tensors: list[torch.Tensor]) -> None:
        """Let the side stream read tensors that are on the device already."""
        for tensor in tensors:
            if tensor.device == self._side.device:
                if not self._waited_for_consumer:
                    self._side.wait_for_outer()
                    self._waited_for_consumer = True
                self._side.record_use(tensor)
