"""Which copies may still read host memory, and who waits for them?

Kept apart from the transfer, so that the end of a pass can wait for its copies without
holding on to the transform, which may refer to the pass itself.
"""

from collections import deque
from dataclasses import dataclass

from gpuprefetch.entry import Prepared
from gpuprefetch.staging import SlotRing
from gpuprefetch.streams import Event, SideStream

__all__ = ["Copies"]


# Not frozen for the same reason as `Prepared`.
@dataclass(slots=True)
class _Copying:
    """Copies of one batch that may still read host memory."""

    copied: Event
    """Recorded on the side stream after the copies of the batch."""
    prepared: Prepared
    """Keeps the source's pinned leaves alive, and names the slot to free."""
    reads_source: bool
    """Some leaf is copied from the source's own memory, not from the slot."""


class Copies:
    """The copies under way of one pass, oldest first.

    Args:
        ring: Where the slots of copied batches go back to.
        side: Where the copies run; its events go back to it.
    """

    def __init__(self, ring: SlotRing, side: SideStream) -> None:
        self._ring = ring
        self._side = side
        # Only the loop's thread reads and writes it.
        self._under_way: deque[_Copying] = deque()

    def add(self, copied: Event, prepared: Prepared, *, reads_source: bool) -> None:
        """Note the copies of one batch, newest of all."""
        newest = self._under_way[-1] if self._under_way else None
        if newest is not None and newest.prepared is prepared:
            # Ctrl-C came while this batch was issued, and it is issued again. The new
            # event covers both copies, and the slot must be freed once.
            self._under_way.pop()
        self._under_way.append(_Copying(copied, prepared, reads_source))

    def free_finished(self, *, but: Prepared | None) -> None:
        """Free the slots whose copies have finished; does not block.

        Args:
            but: A batch that was interrupted and will be issued again, from its slot.
        """
        while self._under_way:
            oldest = self._under_way[0]
            if not oldest.copied.query() or oldest.prepared is but:
                return
            self._retire(oldest)

    def are_in_the_way(self, *, may_refill: bool) -> bool:
        """Whether no slot is free, or some copy reads what may be refilled.

        Args:
            may_refill: The source may write into the batches it gave, when pulled.
        """
        return bool(self._under_way) and (
            not self._ring.has_free or (may_refill and self._reads_source())
        )

    def wait_for_source_and_slot(
        self, *, may_refill: bool, but: Prepared | None
    ) -> None:
        """Wait until they are not; see :meth:`are_in_the_way`.

        Args:
            may_refill: As there.
            but: As in :meth:`free_finished`.
        """
        while self.are_in_the_way(may_refill=may_refill):
            if self._under_way[0].prepared is but:
                return
            self._wait_oldest()

    def wait_all(self) -> None:
        """Wait for every copy; nothing reads host memory afterwards."""
        while self._under_way:
            self._wait_oldest()

    def _reads_source(self) -> bool:
        return any(copying.reads_source for copying in self._under_way)

    def _wait_oldest(self) -> None:
        oldest = self._under_way[0]
        oldest.copied.synchronize()
        self._retire(oldest)

    def _retire(self, finished: _Copying) -> None:
        """Free the slot and the event of the oldest copies."""
        # A signal handler may have closed the pass meanwhile.
        if self._under_way and self._under_way[0] is finished:
            self._under_way.popleft()
            if finished.prepared.slot is not None:
                self._ring.release(finished.prepared.slot)
            self._side.take_back(finished.copied)
