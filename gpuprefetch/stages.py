"""How is one kind of work of a pass timed, and shown to a profiler?

``with stage:`` around it does both. A pass enters several blocks a batch, so a block is
two calls and no more.
"""

from time import perf_counter

from torch.autograd import profiler

from gpuprefetch import ranges
from gpuprefetch.histogram import Histogram
from gpuprefetch.ranges import Range

__all__ = ["Shown", "Stage"]


class Shown:
    """One kind of work that is shown to a profiler, and not timed here.

    Args:
        range_name: What profilers call it.
    """

    __slots__ = ("_opened", "_range_name")

    def __init__(self, range_name: str) -> None:
        self._range_name = range_name
        self._opened: Range | None = None

    def __enter__(self) -> None:
        if profiler._is_profiler_enabled or ranges.is_nvtx_enabled:
            self._show()

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if self._opened is not None:
            self._hide(self._opened)

    def _show(self) -> None:
        self._opened = ranges.begin(self._range_name)

    def _hide(self, opened: Range) -> None:
        opened.end()
        self._opened = None


class Stage(Shown):
    """One kind of work, timed in a ``with`` block; one block at a time.

    Args:
        range_name: What profilers call it; empty: they are not shown it.
    """

    __slots__ = ("_started", "times_ms", "total_s")

    def __init__(self, range_name: str) -> None:
        super().__init__(range_name)
        self._started = 0.0
        self.total_s = 0.0
        """Of all blocks so far."""
        self.times_ms: Histogram | None = None
        """Where the time of each further block is counted."""

    # Written out, since calling the parent's takes as long as all else here.
    def __enter__(self) -> None:
        if profiler._is_profiler_enabled or ranges.is_nvtx_enabled:
            self._show()
        self._started = perf_counter()

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        elapsed_s = perf_counter() - self._started
        self.total_s += elapsed_s
        if self.times_ms is not None:
            self.times_ms.add(elapsed_s * 1e3)
        if self._opened is not None:
            self._hide(self._opened)
