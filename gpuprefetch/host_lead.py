"""How far may the loop's thread be ahead of the device?

[Note: Host lead]
Memory noted by ``record_use`` is free for reuse once the *device* is past it. A host
far ahead of the device therefore makes the allocator reserve one more batch for every
step of its lead. So the loop's thread pauses while it is more than ``depth`` steps
ahead. Work for that many steps is then queued on the device, so the device does not
idle (measured: the same speed with and without the bound).
"""

import collections
from contextlib import AbstractContextManager
from time import perf_counter

import torch

from gpuprefetch.streams import Event, Stream, make_sleeping_event

__all__ = ["HostLead"]

_PATIENCE_S = 200e-6  # How long a thread asks before it sleeps.


class HostLead:
    """Bounds how many steps the loop's thread is ahead of the device.

    See [Note: Host lead].

    Args:
        most_steps: Steps that may be queued on the device before the thread pauses.
        device: Where the loop's kernels run.
    """

    def __init__(self, most_steps: int, device: torch.device) -> None:
        self._most_steps = most_steps
        self._device = device
        # One event a step, oldest first, recorded on the loop's stream at the hand-off.
        # Only the loop's thread reads and writes these.
        self._steps: collections.deque[Event] = collections.deque()
        # Fired, to be recorded again: making an event takes longer.
        self._spare: list[Event] = []

    def wait_in_bounds(self, waiting: AbstractContextManager[object]) -> None:
        """Pause while too many steps are unfinished.

        Args:
            waiting: Entered around each pause, and only there.
        """
        while len(self._steps) > self._most_steps:
            step_begun = self._steps.popleft()
            if not step_begun.query():
                with waiting:
                    _wait_for(step_begun)
            self._spare.append(step_begun)

    def enqueue_step_event(self, consumer: Stream) -> None:
        """Note that the loop's next step is about to be queued on ``consumer``."""
        event = self._spare.pop() if self._spare else make_sleeping_event(self._device)
        event.record(consumer)
        self._steps.append(event)


def _wait_for(event: Event) -> None:
    if not _fires_soon(event):
        event.synchronize()


def _fires_soon(event: Event) -> bool:
    """Ask for a moment before the thread goes to sleep.

    A core that slept is slow for a while. Where the device is hardly behind, the loop's
    next launches would be late, and so would the device.
    """
    deadline_s = perf_counter() + _PATIENCE_S
    while not event.query():
        if perf_counter() > deadline_s:
            return False
    return True
