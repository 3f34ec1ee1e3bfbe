"""What does a loader keep from pass to pass?

Its side streams (one per device, for life) and the pinned slots of passes that ended.
"""

import torch

from gpuprefetch.feeder import Feeder
from gpuprefetch.staging import SlotRing
from gpuprefetch.streams import SideStream

__all__ = ["Resources"]


class Resources:
    """Streams and slots of one loader."""

    def __init__(self) -> None:
        self._side_streams: dict[torch.device, SideStream] = {}
        # Rings that no pass uses, and those that one does.
        self._idle: list[SlotRing] = []
        self._busy: list[SlotRing] = []

    @property
    def pinned_bytes(self) -> int:
        """Bytes of pinned memory held in slots."""
        return sum(ring.pinned_bytes for ring in (*self._idle, *self._busy))

    def side_stream(self, device: torch.device) -> SideStream:
        """Give the stream of this loader on a device; always the same one."""
        if device not in self._side_streams:
            self._side_streams[device] = SideStream(device)
        return self._side_streams[device]

    def take_ring(self, num_slots: int) -> SlotRing:
        """Give a ring of free slots for one pass, with old buffers where there are."""
        fitting = [ring for ring in self._idle if ring.num_slots == num_slots]
        ring = fitting[0] if fitting else SlotRing(num_slots)
        if fitting:
            self._idle.remove(ring)
        ring.open()
        self._busy.append(ring)
        return ring

    def give_back(self, ring: SlotRing, feeder: Feeder) -> None:
        """Take a ring back from a pass whose copies have finished."""
        self._busy.remove(ring)
        # A source that hangs may still be filling a slot: then it is not reused.
        if not feeder.is_running:
            self._idle.append(ring)

    def release(self) -> None:
        """Give all pinned memory back; no pass runs any more."""
        for ring in self._idle:
            ring.give_back_memory()
        self._idle.clear()
