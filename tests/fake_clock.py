"""Time that passes only when a test says so, for all that the loader times.

So that no figure depends on how busy the machine is. A thread that works meanwhile has
no such time: tests with ``background`` sleep, and compare figures with each other.
"""

import pytest

from gpuprefetch import meter, probe, puller, stages

__all__ = ["FakeClock"]

# What one look takes; with four to eight looks a batch the loader seems to take less
# than 0.1 ms, as it does on an ordinary machine.
_LOOK_S = 1e-5


class FakeClock:
    """Stands in for ``time.perf_counter`` in the files that time something."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._now_s = 0.0
        self.num_looks = 0
        """How often somebody has looked at it."""
        for module in (meter, probe, puller, stages):
            monkeypatch.setattr(module, "perf_counter", self._look)

    def _look(self) -> float:
        self.num_looks += 1
        self._now_s += _LOOK_S
        return self._now_s

    def pass_ms(self, ms: float) -> None:
        """Let whoever calls this seem to work for so long."""
        self._now_s += ms / 1e3
