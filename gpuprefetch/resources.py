"""What does a loader keep from pass to pass?

Its side streams (one per device, for life) and the pinned slots of passes that ended.
"""

import torch

from gpuprefetch.feeder import ThreadFeeder
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
        # Threads of passes that ended, but which are still in the source's own code.
        self._leftover: list[ThreadFeeder] = []

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

    def give_back(self, ring: SlotRing | None, feeder: ThreadFeeder | None) -> None:
        """Take back what a pass had, when its copies have finished."""
        is_running = feeder is not None and feeder.is_running
        if feeder is not None and is_running:
            self._leftover.append(feeder)
        if ring is not None:
            self._busy.remove(ring)
            # A thread that is still in the source may yet fill a slot of it.
            if not is_running:
                self._idle.append(ring)

    def wait_for_leftover_threads(self) -> None:
        """Wait until no thread of an earlier pass is in the source any more."""
        while self._leftover:
            self._leftover[0].wait_for_end()
            self._leftover.pop(0)

    def release(self) -> None:
        """Give all pinned memory back; no pass runs any more."""
        for ring in self._idle:
            ring.give_back_memory()
        self._idle.clear()
