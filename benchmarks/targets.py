"""How are figures measured that have targets, and what becomes of a miss?

What the benchmarks of promises share: sizes, a bench that takes turns and keeps
figures, and a command line. Figures are compared within one run; see ``must_reach``.
"""

import argparse
import itertools
import json
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import pipelines
from benchmarks.loops import Over, Step
from benchmarks.machine import describe_machine
from benchmarks.measure import in_turns, synchronize, time_loop
from benchmarks.pipelines import Pair
from benchmarks.record import spread
from gpuprefetch import workloads

__all__ = ["TINY", "Bench", "Figure", "Sizes", "parse_options", "run", "run_with"]


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large and how long the measurements are."""

    image_size: int = 256
    batch_size: int = 32
    steps: int = 150
    """Steps in one timed region over batches in memory."""
    warmup: int = 20
    rounds: int = 5
    loader_steps: int = 200
    """The same over a DataLoader, whose workers have 16 batches ready."""
    num_workers: int = 8
    overhead_steps: int = 40
    overhead_rounds: int = 6


TINY = Sizes(
    32,
    2,
    steps=4,
    warmup=2,
    rounds=2,
    loader_steps=4,
    num_workers=1,
    overhead_steps=4,
    overhead_rounds=2,
)


@dataclass(slots=True)
class Figure:
    """One number, and what it should be."""

    name: str
    value: float
    unit: str
    at_least: float | None = None
    at_most: float | None = None
    samples: list[float] = field(default_factory=list)
    """Single measurements, in the order in which they were made."""

    @property
    def is_held(self) -> bool:
        """Tell whether there is a target."""
        return self.at_least is not None or self.at_most is not None

    @property
    def passed(self) -> bool | None:
        """Tell whether the target was reached; ``None`` without one."""
        if not self.is_held:
            return None
        return (self.at_least is None or self.value >= self.at_least) and (
            self.at_most is None or self.value <= self.at_most
        )

    def to_json(self) -> dict[str, Any]:
        """Give a record for the report."""
        return {
            "name": self.name,
            "value": round(self.value, 4),
            "unit": self.unit,
            "at_least": self.at_least,
            "at_most": self.at_most,
            "passed": self.passed,
            "quartiles": [round(q, 4) for q in self._quartiles()],
            "samples": [round(sample, 4) for sample in self.samples[:20]],
        }

    def _quartiles(self) -> tuple[float, ...]:
        return spread(self.samples)[1] if self.samples else ()

    def __str__(self) -> str:
        target = verdict = ""
        if self.is_held:
            sign, bound = (
                (">=", self.at_least)
                if self.at_least is not None
                else ("<=", self.at_most)
            )
            target = f"target {sign} {bound:g}"
            verdict = "ok" if self.passed else "MISSED"
        return (
            f"{self.name:58s} {self.value:9.3f} {self.unit:8s} {target:16s} {verdict}"
        )


@dataclass(slots=True)
class Bench:
    """What all measurements share."""

    device: torch.device
    sizes: Sizes
    step: Step
    figures: list[Figure] = field(default_factory=list)

    def add(self, *args: Any, **settings: Any) -> None:
        """Keep a figure and print it."""
        figure = Figure(*args, **settings)
        self.figures.append(figure)
        print(figure, flush=True)

    def in_turns(
        self,
        variants: dict[str, Callable[[], Iterator[Pair]]],
        *,
        rounds: int | None = None,
        steps: int | None = None,
    ) -> dict[str, list[float]]:
        """Measure steps/s of each variant once a round, in a new order each round."""
        speeds: dict[str, list[float]] = {name: [] for name in variants}
        for _, name in in_turns(list(variants), rounds or self.sizes.rounds):
            start = variants[name]
            timing = time_loop(
                lambda start=start: Over(start(), self.step),
                self.device,
                steps=steps or self.sizes.steps,
                warmup=self.sizes.warmup,
            )
            speeds[name].append(timing.steps_per_s)
        return speeds

    def add_speeds(self, title: str, speeds: dict[str, list[float]]) -> None:
        """Keep the speed of each variant."""
        for name, samples in speeds.items():
            median = statistics.median(samples)
            self.add(f"{title}: {name}", median, "steps/s", samples=samples)

    def add_ratio(
        self,
        name: str,
        speeds: dict[str, list[float]],
        over: str,
        under: str,
        **target: float,
    ) -> None:
        """Keep the median of one variant's speed over another's, round by round."""
        ratios = [a / b for a, b in zip(speeds[over], speeds[under], strict=True)]
        self.add(name, statistics.median(ratios), "x", samples=ratios, **target)


# Running #


def run(
    device: torch.device,
    sizes: Sizes,
    budget_s: float,
    measurements: Sequence[Callable[[Bench], None]],
) -> dict[str, Any]:
    """Run measurements, however some of them end.

    Args:
        device: What to measure.
        sizes: How large and how long.
        budget_s: Seconds after which no further measurement is begun.
        measurements: Each adds its figures to the bench.

    Returns:
        The report, in values that JSON knows.
    """
    started = time.monotonic()
    torch.manual_seed(0)
    model = workloads.build_model(sizes.image_size, pipelines.NUM_CLASSES)
    # A rate of 0 does the same work, and numbers stay as they are: how fast arithmetic
    # is, and what power it takes, depends on them.
    step = workloads.TrainingStep(model.to(device).train(), learning_rate=0.0)
    bench = Bench(device, sizes, step)
    # Let clocks and memory settle before anything counts.
    warm = pipelines.resident(sizes.batch_size, sizes.image_size, device)
    for images, labels in itertools.islice(warm, sizes.steps):
        step(images, labels)
    synchronize(device)
    errors: dict[str, str] = {}
    for measure in measurements:
        name = measure.__name__
        if time.monotonic() - started > budget_s:
            errors[name] = f"not begun: {budget_s:g} s were over"
            print(f"{name}: {errors[name]}", flush=True)
            continue
        begun = time.monotonic()
        try:
            measure(bench)
        except Exception:
            errors[name] = traceback.format_exc()
            print(errors[name], flush=True)
        print(f"  ({name}: {time.monotonic() - begun:.1f} s)", flush=True)
    return {
        "machine": describe_machine(),
        "device": str(device),
        "seconds": round(time.monotonic() - started, 1),
        "image_size": sizes.image_size,
        "batch_size": sizes.batch_size,
        "figures": [figure.to_json() for figure in bench.figures],
        "errors": errors,
    }


def parse_options(name: str, description: str) -> argparse.ArgumentParser:
    """Make the command line that all benchmarks of this kind share."""
    parser = argparse.ArgumentParser(
        prog=f"benchmarks.{name}", description=description.partition("\n")[0]
    )
    parser.add_argument("--out", type=Path, help="where to write the report, as JSON")
    parser.add_argument("--budget-s", type=float, default=200.0, metavar="SECONDS")
    parser.add_argument("--rounds", type=int, help="repeats of each variant")
    parser.add_argument("--device", type=torch.device, help="default: the accelerator")
    parser.add_argument(
        "--tiny", action="store_true", help="sizes that only show that the code runs"
    )
    return parser


def run_with(
    options: argparse.Namespace,
    sizes: Sizes,
    measurements: Sequence[Callable[[Bench], None]],
) -> int:
    """Run measurements as the command line says, write and sum up the report.

    Returns:
        Exit status: 1 if a target was missed or not measured.
    """
    device = options.device or (
        torch.accelerator.current_accelerator(check_available=True)
        or torch.device("cpu")
    )
    if options.tiny:
        sizes = TINY
    if options.rounds:
        sizes = replace(sizes, rounds=options.rounds)
    report = run(device, sizes, options.budget_s, measurements)
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    held = [figure for figure in report["figures"] if figure["passed"] is not None]
    missed = [figure["name"] for figure in held if not figure["passed"]]
    print(
        f"{len(held) - len(missed)} of {len(held)} targets reached in "
        f"{report['seconds']} s; missed: {missed}; not measured: "
        f"{sorted(report['errors'])}"
    )
    return 1 if missed or report["errors"] else 0
