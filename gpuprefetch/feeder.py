"""In which thread is the source pulled, and how far ahead?

A feeder gets entries from a puller, which prepares each batch in host memory (see
``prepare``); it never issues device work. Two kinds with one face:
:class:`InlineFeeder` pulls when asked, in the loop's thread; :class:`ThreadFeeder`
pulls ahead in a thread.

[Note: Credits]
A thread feeder may have pulled only so many batches that were not yielded yet, wherever
they are: in its hands, in the queue, or in flight on the device. Each pull takes a
credit, each yielded batch gives one back. There are ``depth`` of them, and two more for
a source with worker processes.
"""

import atexit
import logging
import os
import queue
import threading
import weakref
from time import monotonic
from typing import Protocol

import torch

from gpuprefetch.entry import Entry
from gpuprefetch.errors import ForkedError
from gpuprefetch.puller import Puller
from gpuprefetch.staging import SlotRing
from gpuprefetch.streams import is_asynchronous, make_current

__all__ = ["Feeder", "InlineFeeder", "ThreadFeeder"]

_logger = logging.getLogger(__name__)

# How long closing waits for a thread that is inside the source's own code. The thread
# cannot be interrupted there; it ends by itself at the source's next batch or error.
_JOIN_TIMEOUT_S = 2.0
_JOIN_STEP_S = 0.1


class Feeder(Protocol):
    """What a pass needs of either kind."""

    is_inline: bool
    """Whether :meth:`take` runs the source's code in the calling thread."""

    def take(self, *, may_wait: bool) -> Entry | None:
        """Get the next entry; ``None`` when it would have to wait and may not."""

    def note_yielded(self) -> None:
        """Learn that a batch went to the loop, so that another may be pulled."""

    @property
    def num_ready(self) -> int:
        """Count the entries that :meth:`take` would give at once."""

    def drop_iterator(self) -> None:
        """Let go of the source's iterator, unless it is still in use."""


class InlineFeeder:
    """Pulls in the loop's thread, each time it is asked.

    Args:
        puller: Where entries come from.
    """

    is_inline = True

    def __init__(self, puller: Puller) -> None:
        self._puller = puller

    def take(self, *, may_wait: bool) -> Entry | None:
        """Pull the next entry now."""
        return self._puller.pull()

    def note_yielded(self) -> None:
        """Nothing is pulled ahead of the asking."""

    @property
    def num_ready(self) -> int:
        """Nothing is."""
        return 0

    def drop_iterator(self) -> None:
        """Let go of the source's iterator."""
        self._puller.drop_iterator()


class ThreadFeeder:
    """Pulls ahead in a thread named ``gpuprefetch-feeder``.

    The thread knows the puller, the queue and the credits, but not the pass: a pass
    that the loop drops is collected, which closes this feeder.

    Args:
        puller: Where entries come from; used by the thread alone while it runs.
        num_credits: See [Note: Credits].
        ring: Slots that the puller waits for, if it stages; closed with this feeder.
        device: Made current in the thread, for device types whose pinned memory comes
            from torch's allocator.
    """

    is_inline = False

    def __init__(
        self,
        puller: Puller,
        *,
        num_credits: int,
        ring: SlotRing | None,
        device: torch.device,
    ) -> None:
        self._puller = puller
        self._ring = ring
        # Written by the thread, read by the loop. Bounded by the credits.
        self._entries: queue.SimpleQueue[Entry] = queue.SimpleQueue()
        # Given back by the loop for each batch it got, taken by the thread per pull.
        # A queue, since its `put` may run in the middle of its `get`: the garbage
        # collector can close a dropped pass in any thread, this one included.
        self._credits: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(num_credits):
            self._credits.put(None)
        # Set once by the loop's thread; read by the feeder's between two pulls.
        self._stop = threading.Event()
        self._owner_pid = os.getpid()
        # A daemon, since a source that hangs must not keep the interpreter from
        # exiting; `_close_live_feeders` ends the ordinary ones in good order.
        self._thread = threading.Thread(
            target=_feed,
            args=(puller, self._entries, self._credits, self._stop, device),
            name="gpuprefetch-feeder",
            daemon=True,
        )
        _live_feeders.add(self)
        self._thread.start()

    def take(self, *, may_wait: bool) -> Entry | None:
        """Get the next entry in order; wait for it only if ``may_wait``.

        Raises:
            ForkedError: This is a child of the process that has the thread.
        """
        if may_wait and os.getpid() != self._owner_pid:
            raise ForkedError(
                "a pass that was started before a fork cannot go on in the child: its "
                "feeder thread is the parent's. Call iter(loader) in the child."
            )
        try:
            return self._entries.get(block=may_wait)
        except queue.Empty:
            return None

    def note_yielded(self) -> None:
        """Give one credit back."""
        self._credits.put(None)

    @property
    def num_ready(self) -> int:
        """Count what the thread has pulled and the loop has not taken."""
        return self._entries.qsize()

    def stop(self) -> None:
        """Tell the thread to end, and wait for that, within limits."""
        if os.getpid() != self._owner_pid:
            # A forked child has this object but not its thread.
            return
        self._stop.set()
        self._credits.put(None)  # Wakes the thread if it waits for a credit.
        if self._ring is not None:
            self._ring.close()
        if self._thread is threading.current_thread():
            # The garbage collector came to a dropped pass in here.
            return
        if not self._ends_in_time():
            _logger.warning(
                "the source is still busy with a batch %s s after its pass was closed; "
                "thread %s ends when that batch is done. Look for a dataset or worker "
                "that hangs. logging.getLogger('gpuprefetch').setLevel(logging.ERROR) "
                "silences this.",
                _JOIN_TIMEOUT_S,
                self._thread.name,
            )

    def _ends_in_time(self) -> bool:
        """Wait for the thread, unless it will end by itself.

        Ctrl-C ends the workers too. The thread may wait for a batch of theirs until
        torch looks after them, which it does every five seconds.
        """
        deadline_s = monotonic() + _JOIN_TIMEOUT_S
        while monotonic() < deadline_s:
            self._thread.join(_JOIN_STEP_S)
            if not self._thread.is_alive() or self._puller.has_lost_workers:
                return True
        return False

    def drop_iterator(self) -> None:
        """Let go of the source's iterator, and of its workers.

        While the thread still runs, it is in the source's own code; it lets go by
        itself when it comes out.
        """
        if os.getpid() == self._owner_pid and not self._thread.is_alive():
            self._puller.drop_iterator()

    def wait_for_end(self) -> None:
        """Wait for the thread without limit; after :meth:`stop`."""
        if self._thread is not threading.current_thread():
            self._thread.join()

    @property
    def is_running(self) -> bool:
        """Tell whether the thread may still be in the source's code or fill a slot."""
        return self._thread.is_alive()


def _feed(
    puller: Puller,
    entries: queue.SimpleQueue[Entry],
    credits_left: queue.SimpleQueue[None],
    stop: threading.Event,
    device: torch.device,
) -> None:
    """Pull until the source ends, fails, or ``stop`` is set; the thread's main.

    Whatever happens, the last entry put says that there are no more: the loop waits.
    """
    try:
        if is_asynchronous(device):
            make_current(device)
        while True:
            credits_left.get()
            if stop.is_set():
                entries.put(Entry())
                break
            entry = puller.pull()
            is_last = entry.is_last
            entries.put(entry)
            if is_last:
                break
            del entry  # Not kept alive while the next one is pulled.
    except BaseException as error:
        # Also SystemExit and the like.
        entries.put(Entry(error=error))
    if stop.is_set():
        puller.drop_iterator()


# Feeders whose thread may run, for the end of the interpreter.
_live_feeders: weakref.WeakSet[ThreadFeeder] = weakref.WeakSet()


@atexit.register
def _close_live_feeders() -> None:
    """End every feeder while threads and worker processes still work normally."""
    for feeder in list(_live_feeders):
        feeder.stop()
        feeder.drop_iterator()
