"""Which copies does one batch need, and what do they read?"""

from typing import Any

import torch

from gpuprefetch.containers import has_own_to, tensors_within
from gpuprefetch.entry import Prepared
from gpuprefetch.move import move_leaf, num_bytes_of, wrap_like
from gpuprefetch.staging import StagedLeaf, tensor_in
from gpuprefetch.streams import SideStream, Stream, default_stream

__all__ = ["BatchCopy"]


class BatchCopy:
    """The copies of one batch, issued while the side stream is current.

    Args:
        side: The side stream.
        prepared: The batch, and the slot where its staged leaves lie.
        consumer: The loop's stream, which made what is on the device already.
    """

    def __init__(self, side: SideStream, prepared: Prepared, consumer: Stream) -> None:
        self._side = side
        self._device = side.device
        self._prepared = prepared
        self._consumer = consumer
        self._shared_device: torch.Tensor | None = None
        self.num_bytes = 0
        """Bytes of dense tensors issued so far."""
        self.reads_source = False
        """Whether a copy reads the source's own memory."""
        self.adopted = False
        """Whether a part of the batch is a tensor of the source's on the device."""

    def enqueue_leaf(self, leaf: Any) -> Any:
        """Issue the copy of one leaf; not readable by the loop before the hand-off."""
        kind = type(leaf)
        if kind is StagedLeaf:
            return self._copy_staged(leaf)
        if kind is torch.Tensor and leaf.is_cpu and leaf.layout is torch.strided:
            # What nearly every leaf is; `_move_other` asks more than it copies.
            self.reads_source = True
            self.num_bytes += leaf.nbytes
            return leaf.to(self._device, non_blocking=True)
        return self._move_other(leaf)

    def _copy_staged(self, leaf: StagedLeaf) -> torch.Tensor:
        self.num_bytes += leaf.num_bytes
        if leaf.host is not None:
            leaf_device = self._to_device(leaf.host)
        else:
            if self._shared_device is None:
                self._shared_device = self._to_device(self._shared_host())
            leaf_device = tensor_in(self._shared_device, leaf, leaf.offset)
        return wrap_like(leaf_device, leaf.like)

    def _shared_host(self) -> torch.Tensor:
        slot = self._prepared.slot
        assert slot is not None
        return slot.bytes_host[: slot.shared_bytes]

    def _move_other(self, leaf: Any) -> Any:
        """Move a tensor of another kind, or an object that moves itself."""
        is_tensor = isinstance(leaf, torch.Tensor)
        if is_tensor or has_own_to(leaf):
            self._adopt([leaf] if is_tensor else tensors_within(leaf))
        moved = move_leaf(
            leaf,
            batch=self._prepared.batch_host,
            device=self._device,
            non_blocking=True,
        )
        if moved is not leaf or has_own_to(leaf):
            self.reads_source = True
            self.num_bytes += num_bytes_of(moved)
        return moved

    def _to_device(self, leaf_host: torch.Tensor) -> torch.Tensor:
        return leaf_host.to(self._device, non_blocking=True)

    def _adopt(self, tensors: list[torch.Tensor]) -> None:
        """Let the side stream read tensors that are on the device already."""
        for tensor in tensors:
            if tensor.device == self._device:
                if not self.adopted:
                    # Made by the loop, or by a source in a thread, which issues on the
                    # default stream.
                    self._side.enqueue_wait_for(self._consumer)
                    self._side.enqueue_wait_for(default_stream(self._device))
                    self.adopted = True
                self._side.record_use(tensor)
