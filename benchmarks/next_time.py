"""How long does the loop's thread spend in ``next()``, without what it waits for?

Between two batches the host is busy as a training loop is: it issues small operations
to the device, long enough for copies to land. Cases take turns in short rounds, since
the clock of a shared host wanders by a factor of two within seconds.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping

import torch

from benchmarks.measure import in_turns
from benchmarks.pipelines import Pair

__all__ = ["Loop", "make_busy", "sleep", "time_next_in_turns"]

_PAUSE_S = 0.003

Loop = Callable[[], None]
"""What the loop does between two batches."""


def make_busy(device: torch.device) -> Loop:
    """Issue small operations for a while, as the host's part of a step does."""
    numbers = torch.ones(1000, device=device)

    def busy() -> None:
        end = time.perf_counter() + _PAUSE_S
        while time.perf_counter() < end:
            numbers.mul_(1.0)

    return busy


def sleep() -> None:
    """Let the core rest: whatever comes after it takes longer for a while."""
    time.sleep(_PAUSE_S)


def time_next_in_turns(
    cases: Mapping[str, Callable[[], Iterator[Pair]]],
    *,
    rounds: int,
    steps: int,
    pause: Loop,
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Time ``next()`` and the dropping of the batch after it.

    Args:
        cases: Each starts a pipeline that gives more than ``rounds * steps`` batches.
        rounds: How often each has its turn.
        steps: Batches timed in a turn; some come before.
        pause: What the loop does between two batches.

    Returns:
        Microseconds of every ``next()`` by case, and the median of the dropping.
    """
    next_us: dict[str, list[float]] = {name: [] for name in cases}
    drop_us: dict[str, list[float]] = {name: [] for name in cases}
    running = {name: start() for name, start in cases.items()}
    try:
        for _, name in in_turns(list(cases), rounds):
            spent, dropped = _time_turn(running[name], steps, pause)
            next_us[name] += spent
            drop_us[name] += dropped
    finally:
        for batches in running.values():
            batches.close()  # type: ignore[attr-defined]
    return next_us, {name: statistics.median(us) for name, us in drop_us.items()}


def _time_turn(
    batches: Iterator[Pair], steps: int, pause: Loop
) -> tuple[list[float], list[float]]:
    next_us, drop_us = [], []
    warmup = max(steps // 4, 3)
    for number in range(steps + warmup):
        pause()
        start = time.perf_counter_ns()
        batch = next(batches)
        middle = time.perf_counter_ns()
        del batch
        end = time.perf_counter_ns()
        if number >= warmup:
            next_us.append((middle - start) / 1e3)
            drop_us.append((end - middle) / 1e3)
    return next_us, drop_us
