"""What do the loader's statistics, which are always on, cost a training loop?

    python -m benchmarks.stats_cost [--out FILE] [--budget-s 200] [--tiny]

The loader as it is takes turns with one whose meter does nothing. Held to less than 1 %
of a training step, and to 10 us of ``next()``, of which the counting of readings, done
for many batches at once, is timed on its own. A figure that is negative is noise. What
the meter's empty methods take is in neither, nor are two looks at the clock around the
source's own code.
"""

import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from benchmarks import next_time, pipelines
from benchmarks.pipelines import Pair
from benchmarks.targets import Bench, Sizes, parse_options, run_with
from gpuprefetch import figures, meter
from gpuprefetch.meter import Meter
from gpuprefetch.stages import Stage
from gpuprefetch.times import Reading, Times


class _NoStage:
    """Times nothing and shows nothing."""

    total_s = 0.0

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        pass


class _SilentMeter(Meter):
    """Counts batches alone."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        for name, value in vars(self).items():
            if isinstance(value, Stage):
                setattr(self, name, _NoStage())

    def begin_next(self, queued: int) -> None:
        pass

    def end_next(self) -> None:
        self.yielded += 1

    def note_pull(self, seconds: float, *, is_batch: bool = True) -> None:
        pass

    def begin_copy(self, side: Any) -> bool:
        return False


def _variants(bench: Bench) -> dict[str, Callable[[], Iterator[Pair]]]:
    sizes = bench.sizes
    pinned = pipelines.InMemory(sizes.batch_size, sizes.image_size, pin=True)

    def ours(kind: type[Meter]) -> Iterator[Pair]:
        with mock.patch.object(figures, "Meter", kind):
            # The meter is made when the pass starts, and stays.
            batches = pipelines.stream_prefetch(pinned, bench.device)
            first = next(batches)
        yield first
        yield from batches

    return {
        "measured": lambda: ours(Meter),
        "silent": lambda: ours(_SilentMeter),
    }


def measure_next(bench: Bench) -> None:
    """Time next() with and without, when nothing has to be waited for.

    One batch in eight has timing events, so the medians are those of the others, and
    the 95th percentiles show what the events take.
    """
    samples, _ = next_time.time_next_in_turns(
        _variants(bench),
        rounds=bench.sizes.overhead_rounds,
        steps=bench.sizes.overhead_steps,
        pause=next_time.make_busy(bench.device),
    )
    medians = {name: statistics.median(values) for name, values in samples.items()}
    for name, values in samples.items():
        bench.add(f"next(), {name}", medians[name], "us", samples=values)
        bench.add(f"next(), {name}: p95", _p95(values), "us")
    counting = _counting_us(next_time.make_busy(bench.device))
    bench.add("counting the readings of one batch", counting, "us")
    cost = medians["measured"] - medians["silent"] + counting
    bench.add("next(): what the statistics take", cost, "us", at_most=10.0)


def _counting_us(pause: next_time.Loop) -> float:
    """Time how readings are counted, as many at once as the meter counts."""
    num_batches = meter._READINGS_AT_ONCE // 3  # A batch leaves three.
    times, samples = Times(), []
    for _ in range(20):
        readings: deque[Reading] = deque()
        for number in range(num_batches):
            now_s = float(number)
            readings.append((now_s, 2))
            readings.append(now_s / 2)
            readings.append((now_s + 1e-4, now_s / 2, now_s / 3, now_s / 4, 0.0))
        pause()
        started_s = time.perf_counter()
        times.take(readings, is_threaded=True)
        samples.append((time.perf_counter() - started_s) * 1e6 / num_batches)
    return statistics.median(samples)


def _p95(samples: list[float]) -> float:
    return sorted(samples)[int(0.95 * (len(samples) - 1))]


def measure_training(bench: Bench) -> None:
    """Train with and without."""
    speeds = bench.in_turns(_variants(bench), rounds=max(bench.sizes.rounds, 7))
    bench.add_speeds("copy + float", speeds)
    title = "copy + float: measured / silent"
    bench.add_ratio(title, speeds, "measured", "silent", at_least=0.99)


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line; see the module's docstring."""
    parser = parse_options("stats_cost", __doc__ or "")
    options = parser.parse_args(arguments)
    return run_with(options, Sizes(), (measure_next, measure_training))


if __name__ == "__main__":
    sys.exit(main())
