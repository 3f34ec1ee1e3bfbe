"""What do the loader's statistics, which are always on, cost a training loop?

    python -m benchmarks.stats_cost [--out FILE] [--budget-s 200] [--tiny]

The loader as it is takes turns with one whose meter does nothing. Held to less than 1 %
of a training step, and to 10 us of ``next()``. A figure that is negative is noise.
"""

import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from benchmarks import must_reach, pipelines
from benchmarks.must_reach import Bench, Sizes
from benchmarks.pipelines import Pair
from gpuprefetch import figures
from gpuprefetch.meter import Meter, Stage


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

    def note_pull(self, seconds: float) -> None:
        pass

    def note_in_flight(self, batches_device: Any) -> None:
        pass

    def begin_copy(self, side: Any) -> None:
        pass

    def end_copy(self, side: Any) -> None:
        pass

    def end_transform(self, side: Any) -> None:
        pass

    def end_stall(self, consumer: Any) -> None:
        pass


def _variants(bench: Bench) -> dict[str, Callable[[], Iterator[Pair]]]:
    sizes = bench.sizes
    pinned = pipelines.InMemory(sizes.batch_size, sizes.image_size, pin=True)

    def ours(meter: type[Meter]) -> Iterator[Pair]:
        with mock.patch.object(figures, "Meter", meter):
            yield from pipelines.stream_prefetch(pinned, bench.device)

    return {
        "measured": lambda: ours(Meter),
        "silent": lambda: ours(_SilentMeter),
    }


def measure_next(bench: Bench) -> None:
    """Time next() with and without, when nothing has to be waited for."""
    samples: dict[str, list[float]] = {"measured": [], "silent": []}
    for _ in range(bench.sizes.rounds):
        for name, start in _variants(bench).items():
            next_us, _ = must_reach.time_next(
                start(), bench.sizes.overhead_steps, must_reach.spin
            )
            samples[name].append(statistics.median(next_us))
    for name, values in samples.items():
        bench.add(f"next(), {name}", statistics.median(values), "us", samples=values)
    pairs = zip(samples["measured"], samples["silent"], strict=True)
    costs = [measured - silent for measured, silent in pairs]
    title = "next(): what the statistics take"
    bench.add(title, statistics.median(costs), "us", samples=costs, at_most=10.0)


def measure_training(bench: Bench) -> None:
    """Train with and without."""
    speeds = bench.in_turns(_variants(bench), rounds=max(bench.sizes.rounds, 7))
    bench.add_speeds("copy + float", speeds)
    title = "copy + float: measured / silent"
    bench.add_ratio(title, speeds, "measured", "silent", at_least=0.99)


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line; see the module's docstring."""
    parser = must_reach.parse_options("stats_cost", __doc__ or "")
    options = parser.parse_args(arguments)
    return must_reach.run_with(options, Sizes(), (measure_next, measure_training))


if __name__ == "__main__":
    sys.exit(main())
