"""What is done to a batch in host memory before it goes to the device?

Runs where the source is pulled: in the feeder thread, or in the loop's thread. Batches
for a device that copies beside the loop have their pageable leaves packed into a pinned
slot. A batch that a thread pulls ahead is copied whole if its source may refill it.
"""

from typing import Any

import torch

from gpuprefetch.batch import leaves_of, map_leaves
from gpuprefetch.feeder import Prepared
from gpuprefetch.move import is_plain_dense
from gpuprefetch.scope import transform_modes
from gpuprefetch.staging import SlotRing, fill_slot
from gpuprefetch.streams import PinnedBuffer

__all__ = ["StagingPreparer", "prepare_as_is", "prepare_by_cloning"]


def prepare_as_is(batch: Any) -> Prepared:
    """Leave the batch in the source's own memory."""
    return Prepared(batch)


def prepare_by_cloning(batch: Any) -> Prepared:
    """Copy every tensor, so that the source may write into its own again."""

    def clone(leaf: Any) -> Any:
        return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf

    with torch.no_grad():
        return Prepared(map_leaves(batch, clone))


class StagingPreparer:
    """Packs the leaves that are not pinned into a slot.

    Args:
        ring: Where free slots come from.
        device: Accelerator that will read them.
        copy_all: Pack pinned leaves too, since the source may refill its memory while
            they wait for their copy.
    """

    def __init__(self, ring: SlotRing, *, device: torch.device, copy_all: bool) -> None:
        self._ring = ring
        self._device = device
        self._copy_all = copy_all

    def __call__(self, batch: Any) -> Prepared:
        """Prepare one batch; waits while no slot is free."""
        leaves_host = [leaf for leaf in leaves_of(batch) if self._needs_slot(leaf)]
        if not leaves_host:
            return Prepared(batch)
        slot = self._ring.acquire()
        if slot is None:
            # The pass was closed while this thread waited; nobody takes this entry.
            return Prepared(None)
        with transform_modes(self._device):
            staged = iter(fill_slot(slot, leaves_host, self._allocate))
        wanted = set(map(id, leaves_host))

        def stand_in(leaf: Any) -> Any:
            return next(staged) if id(leaf) in wanted else leaf

        return Prepared(map_leaves(batch, stand_in), slot)

    def _needs_slot(self, leaf: Any) -> bool:
        if not isinstance(leaf, torch.Tensor):
            return False
        # Asked first: true of most leaves that need no slot, and quickly answered.
        if leaf.is_cpu and not self._copy_all and leaf.is_pinned():
            return False
        return is_plain_dense(leaf)

    def _allocate(self, num_bytes: int) -> PinnedBuffer:
        return PinnedBuffer(num_bytes, self._device)
