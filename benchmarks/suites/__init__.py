"""Which suites are there? In the order in which they run."""

from benchmarks.suite import Suite
from benchmarks.suites import in_memory

__all__ = ["SUITES"]

SUITES: tuple[Suite, ...] = (in_memory.SUITE,)
