"""How do pageable batches get into pinned memory, and when is that memory reused?

A copy from ordinary (pageable) memory blocks the thread that issues it; one from pinned
memory does not. So leaves that arrive pageable are copied into a *slot* first: one
pinned buffer that holds all such leaves of one batch, each at an aligned offset.

[Note: Slot reuse]
A pass has a slot for each batch that may be pulled and not yet yielded, and one more,
whose copy to the device may still run. A slot's way:

    free --filled (feeder)--> filled --pinned, copies issued (loop's thread)--> copying
      ^                                                                           |
      +----------- copied event has fired (seen by the loop's thread) ------------+

The feeder waits on the queue of free slots; it asks no event and locks no page: such a
call from another thread would spoil a graph capture that the loop has under way. Slots
keep their buffers from pass to pass; a buffer is replaced when a larger batch comes and
given back by :meth:`SlotRing.give_back_memory`.

Small leaves of a batch travel in one device copy, as one block, and large ones each on
their own. Packing all of them would tie a few labels that the user keeps to the memory
of the whole batch of images.
"""

import ctypes
import queue
from collections.abc import Callable

import torch

from gpuprefetch.pinned import PinnedBuffer

__all__ = ["Slot", "SlotRing", "StagedLeaf", "fill_slot", "tensor_in"]

# Offset of a leaf in a slot: what the device's allocator itself guarantees.
_ALIGNMENT = 512

# Largest leaf, in bytes, that shares a device block with others.
_SHARED_LEAF_BYTES = 64 * 1024


class StagedLeaf:
    """Stands in a batch for a leaf whose bytes lie in the batch's slot.

    A plain class on purpose: a dataclass would be walked as a part of the batch.
    """

    __slots__ = (
        "dtype",
        "host",
        "is_shared",
        "like",
        "num_bytes",
        "offset",
        "shape",
        "stride",
    )

    def __init__(self, leaf: torch.Tensor) -> None:
        self.num_bytes = leaf.numel() * leaf.element_size()
        """Bytes that the leaf takes, without padding."""
        self.is_shared = self.num_bytes <= _SHARED_LEAF_BYTES
        """Whether it travels in the one block of the small leaves."""
        self.host: torch.Tensor | None = None
        """The leaf in the slot, where it travels on its own; set when that is filled.
        Made by the thread that fills, to spare the one that issues copies."""
        self.offset = 0
        """First byte in the slot; set when the slot is laid out."""
        self.dtype = leaf.dtype
        self.shape = leaf.shape
        self.stride = _stride_of(leaf)
        """Strides in elements: those that ``leaf.to(device)`` would have."""
        self.like = None if type(leaf) is torch.Tensor else leaf
        """The source's own leaf where its class is to be given back on the device."""


class Slot:
    """Pinned memory for one batch; see [Note: Slot reuse]."""

    def __init__(self) -> None:
        self.buffer: PinnedBuffer | None = None
        # Written by the thread that fills, when a larger batch comes; unlocked by the
        # one that issues copies. The slot is with one of them at a time.
        self._outgrown: list[PinnedBuffer] = []
        self.shared_bytes = 0
        """The slot's first bytes, which hold the small leaves and go in one copy."""

    @property
    def bytes_host(self) -> torch.Tensor:
        """The whole buffer: (num_bytes,), uint8, pinned."""
        assert self.buffer is not None
        return self.buffer.bytes

    @property
    def pinned_bytes(self) -> int:
        """Bytes that this slot keeps locked."""
        return 0 if self.buffer is None else self.buffer.num_bytes

    def reserve(self, num_bytes: int, allocate: Callable[[int], PinnedBuffer]) -> None:
        """Make room for a batch; nothing reads the slot any more at this time."""
        if self.pinned_bytes < num_bytes:
            if self.buffer is not None:
                self._outgrown.append(self.buffer)
            self.buffer = allocate(num_bytes)

    def pin(self) -> None:
        """Page-lock the slot before copies; for the thread that issues them."""
        assert self.buffer is not None
        self.buffer.pin()
        while self._outgrown:
            self._outgrown.pop().unpin()

    def give_back_memory(self) -> None:
        """Give the pinned memory back; nothing may read it any more."""
        for buffer in (*self._outgrown, self.buffer):
            if buffer is not None:
                buffer.unpin()
        self._outgrown.clear()
        self.buffer = None


class SlotRing:
    """The slots of one pass and who may fill the next one.

    Args:
        num_slots: How many batches may lie in pinned memory at once.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._slots = [Slot() for _ in range(num_slots)]
        self.open()

    def open(self) -> None:
        """Make all slots free for a new pass; the last pass has ended."""
        # Put by the loop's thread, taken by the one that pulls. `None` says that the
        # ring is closed.
        self._free: queue.SimpleQueue[Slot | None] = queue.SimpleQueue()
        for slot in self._slots:
            self._free.put(slot)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of pinned memory held by all slots."""
        return sum(slot.pinned_bytes for slot in self._slots)

    @property
    def has_free(self) -> bool:
        """Tell whether :meth:`wait_for_slot` would return at once."""
        return not self._free.empty()

    def wait_for_slot(self) -> Slot | None:
        """Take a free slot, as soon as there is one; ``None`` once closed."""
        return self._free.get()

    def release(self, slot: Slot) -> None:
        """Put a slot back whose copies have all finished."""
        self._free.put(slot)

    def close(self) -> None:
        """Wake the feeder, which is to take no further slot."""
        self._free.put(None)

    def give_back_memory(self) -> None:
        """Give all pinned memory back; no copy may run and no feeder fill any more."""
        for slot in self._slots:
            slot.give_back_memory()


# Filling #


def fill_slot(
    slot: Slot,
    leaves_host: list[torch.Tensor],
    allocate: Callable[[int], PinnedBuffer],
) -> list[StagedLeaf]:
    """Copy a batch's leaves into a slot.

    Args:
        slot: Free; afterwards it holds the leaves until their copies have finished.
        leaves_host: Dense CPU tensors, any strides.
        allocate: Makes a pinned buffer of the size given, in bytes.

    Returns:
        What stands for each leaf, in the order given.
    """
    staged = [StagedLeaf(leaf) for leaf in leaves_host]
    slot.shared_bytes, num_bytes = _lay_out(staged)
    slot.reserve(num_bytes, allocate)
    for leaf, place in zip(leaves_host, staged, strict=True):
        if not place.is_shared:
            place.host = tensor_in(slot.bytes_host, place, place.offset)
        if place.num_bytes == 0:
            continue
        if leaf.stride() == place.stride and not (leaf.is_conj() or leaf.is_neg()):
            # Same bytes in the same order. memmove lets go of the interpreter's lock
            # and uses one core, where Tensor.copy_ would take the workers' cores too.
            target = slot.bytes_host.data_ptr() + place.offset
            ctypes.memmove(target, leaf.data_ptr(), place.num_bytes)
        else:
            tensor_in(slot.bytes_host, place, place.offset).copy_(leaf)
    return staged


def _lay_out(staged: list[StagedLeaf]) -> tuple[int, int]:
    """Place small leaves first, then large ones; give the shared and all bytes."""
    small = [place for place in staged if place.is_shared]
    if len(small) == 1:
        # On its own it is copied as it is: no part of a block has to be built.
        small[0].is_shared = False
    end = shared_bytes = 0
    for place in sorted(staged, key=lambda place: not place.is_shared):
        place.offset = end
        end += -(-place.num_bytes // _ALIGNMENT) * _ALIGNMENT
        if place.is_shared:
            shared_bytes = end
    return shared_bytes, max(end, 1)


def _stride_of(leaf: torch.Tensor) -> tuple[int, ...]:
    """Give the strides that a copy to another device would have."""
    if leaf.is_contiguous():
        return leaf.stride()
    # The rule (dense layouts are kept, others packed) is torch's own.
    return torch.empty_like(leaf, device="meta").stride()


def tensor_in(
    bytes_block: torch.Tensor, place: StagedLeaf, offset: int
) -> torch.Tensor:
    """Build a leaf on a block of bytes, on the host or on the device.

    It shares the memory but is no view: each leaf has its own version counter, so an
    in-place operation on one does not invalidate another for autograd.

    Args:
        bytes_block: (n,), uint8, contiguous.
        place: Type, shape and strides of the leaf.
        offset: Its first byte in the block.
    """
    leaf = torch.empty(0, dtype=place.dtype, device=bytes_block.device)
    return leaf.set_(
        bytes_block.untyped_storage(),
        offset // leaf.element_size(),
        place.shape,
        place.stride,
    )
