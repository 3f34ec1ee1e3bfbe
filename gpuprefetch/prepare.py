"""What is done to a batch in host memory before it goes to the device?

Runs where the source is pulled: in the feeder thread, or in the loop's thread. Batches
for a device that copies beside the loop have their pageable leaves packed into a pinned
slot. Where a source may refill a batch before its copy is issued, all its tensors and
arrays are copied; what moves itself is the user's to copy.
"""

from typing import Any

import torch

from gpuprefetch.batch import leaves_of, map_leaves
from gpuprefetch.entry import Prepared
from gpuprefetch.kinds import is_array
from gpuprefetch.meter import Meter
from gpuprefetch.move import is_plain_dense
from gpuprefetch.pinned import PinnedBuffer
from gpuprefetch.scope import transform_modes
from gpuprefetch.staging import Slot, SlotRing, StagedLeaf, fill_slot

__all__ = ["StagingPreparer", "prepare_as_is", "prepare_by_cloning"]


def prepare_as_is(batch: Any) -> Prepared:
    """Leave the batch in the source's own memory."""
    return Prepared(batch)


def prepare_by_cloning(batch: Any) -> Prepared:
    """Copy tensors and arrays, so that the source may write into its own again."""

    def clone(leaf: Any) -> Any:
        return leaf.clone() if isinstance(leaf, torch.Tensor) else _copy_array(leaf)

    with torch.no_grad():
        return Prepared(map_leaves(batch, clone))


def _copy_array(leaf: Any) -> Any:
    """Copy a NumPy array; return everything else as it is."""
    return leaf.copy() if is_array(leaf) else leaf


class StagingPreparer:
    """Packs the leaves that are not pinned into a slot.

    Args:
        ring: Where free slots come from.
        device: Accelerator that will read them.
        may_refill: The source may write into the memory of this batch, once it is asked
            for the next one.
        is_threaded: That may happen before the copy of this batch is issued. Then
            leaves that are pinned are packed too.
        meter: Told how long packing takes.
    """

    def __init__(
        self,
        ring: SlotRing,
        *,
        device: torch.device,
        may_refill: bool,
        is_threaded: bool,
        meter: Meter,
    ) -> None:
        self._ring = ring
        self._device = device
        self._modes = transform_modes(device)
        self._meter = meter
        self._copies_pinned = may_refill and is_threaded
        self._copies_arrays = may_refill

    def __call__(self, batch: Any) -> Prepared:
        """Prepare one batch; waits while no slot is free."""
        leaves = leaves_of(batch)
        # Nearly every leaf is a plain tensor, which is told more quickly.
        others = [leaf for leaf in leaves if type(leaf) is not torch.Tensor]
        if others and self._copies_arrays and any(map(is_array, others)):
            batch = map_leaves(batch, _copy_array)
        skips_pinned = not self._copies_pinned
        leaves_host = [
            leaf
            for leaf in leaves
            if isinstance(leaf, torch.Tensor)
            # Asked first: true of most leaves that need no slot, and quickly answered.
            and not (skips_pinned and leaf.is_cpu and leaf.is_pinned())
            and is_plain_dense(leaf)
        ]
        places: dict[int, StagedLeaf] = {}
        slot = None
        if leaves_host:
            slot = self._ring.wait_for_slot()
            if slot is None:
                # The pass was closed while this thread waited; nobody takes this.
                return Prepared(None)
            places = self._fill(slot, leaves_host)
        elif not self._copies_pinned:
            return Prepared(batch)

        def stand_in(leaf: Any) -> Any:
            if id(leaf) in places:
                return places[id(leaf)]
            if self._copies_pinned and isinstance(leaf, torch.Tensor) and leaf.is_cpu:
                # Sparse and other layouts, which do not fit into a slot.
                return leaf.clone()
            return leaf

        return Prepared(map_leaves(batch, stand_in), slot)

    def _fill(
        self, slot: Slot, leaves_host: list[torch.Tensor]
    ) -> dict[int, StagedLeaf]:
        """Pack leaves; give what stands for each, by the leaf's identity."""
        try:
            with self._meter.pinning, self._modes:
                staged = fill_slot(slot, leaves_host, self._allocate)
        except BaseException:
            # Ctrl-C too: in the loop's thread, nobody else could free the slot.
            self._ring.release(slot)
            raise
        return {
            id(leaf): place for leaf, place in zip(leaves_host, staged, strict=True)
        }

    def _allocate(self, num_bytes: int) -> PinnedBuffer:
        return PinnedBuffer(num_bytes, self._device)
