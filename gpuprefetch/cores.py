"""How many CPU cores are there for this process, and how many workers do they bear?"""

import os

__all__ = ["FEW_WORKERS", "count_cores", "workers_for"]

FEW_WORKERS = 4
"""Workers that a user is told to begin with, where there are as many cores."""


def count_cores() -> int:
    """Count the CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def workers_for(wanted: int) -> int:
    """Give so many worker processes, and no more than there are cores."""
    return min(wanted, count_cores())
