"""Does the loader reach on this machine what it promises?

    python -m benchmarks.must_reach [--out FILE] [--budget-s 200] [--tiny]

Every figure is compared within this one run: variants take turns, round by round, and a
ratio is the median of the ratios of single rounds. Absolute numbers of two machines, or
of two runs, are not to be compared.

Prints one line for each figure, with its target and "ok" or "MISSED" where it has one,
and writes them as JSON. The exit status is 1 if a target was missed or not measured.
How to read them: see README.md in this directory.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks import next_time, pipelines
from benchmarks.loops import Over, Step
from benchmarks.machine import describe_machine
from benchmarks.measure import in_turns, synchronize, time_loop
from benchmarks.pipelines import Pair
from benchmarks.record import spread
from gpuprefetch import host_lead, workloads


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


_TINY = Sizes(
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


# What is measured #


def measure_overhead(bench: Bench) -> None:
    """Time next() when nothing has to be waited for: the loader's own work.

    Held to the target on a host that is busy between two batches, as a training loop
    is. After a sleep everything takes longer, the same work written by hand too.
    """
    sizes, device = bench.sizes, bench.device
    pinned = pipelines.InMemory(sizes.batch_size, sizes.image_size, pin=True)
    pageable = pipelines.InMemory(sizes.batch_size, sizes.image_size, pin=False)
    ours = pipelines.stream_prefetch
    chain = workloads.kornia_chain(sizes.image_size)
    # Batches from pageable memory are packed by a thread, or else by next() itself.
    cases: dict[str, tuple[Callable[[], Iterator[Pair]], dict[str, float]]] = {
        "pinned": (lambda: ours(pinned, device, None), {"at_most": 100.0}),
        "staged, thread": (
            lambda: ours(pageable, device, None, background=True),
            {"at_most": 100.0},
        ),
        "Kornia chain, fused": (
            lambda: ours(pinned, device, chain),
            {"at_most": 150.0},
        ),
        "pinned, float": (lambda: ours(pinned, device), {}),
    }
    if device.type == "cuda":
        by_hand = pipelines.one_ahead
        cases["by hand, pinned"] = (lambda: by_hand(pinned, device, _same), {})
    starts = {name: start for name, (start, _) in cases.items()}
    busy = next_time.make_busy(device)
    next_us, drop_us = next_time.time_next_in_turns(
        starts, rounds=sizes.overhead_rounds, steps=sizes.overhead_steps, pause=busy
    )
    for name, (_, target) in cases.items():
        samples = next_us[name]
        median = statistics.median(samples)
        bench.add(f"next(), {name}", median, "us", samples=samples, **target)
        bench.add(f"next(), {name}: p90", _p90(samples), "us")
        bench.add(f"dropping the batch, {name}", drop_us[name], "us")
    pinned_only = {name: starts[name] for name in starts if "pinned" in name}
    next_us, _ = next_time.time_next_in_turns(
        pinned_only, rounds=1, steps=sizes.overhead_steps, pause=next_time.sleep
    )
    for name, samples in next_us.items():
        median = statistics.median(samples)
        bench.add(f"next(), {name}, after a sleep", median, "us", samples=samples)


def _same(images: torch.Tensor) -> torch.Tensor:
    return images


def _p90(samples: list[float]) -> float:
    return sorted(samples)[int(0.9 * (len(samples) - 1))]


def measure_copy_and_float(bench: Bench) -> None:
    """Train over batches in memory: what copying and converting costs a loop."""
    sizes, device = bench.sizes, bench.device
    size = sizes.batch_size, sizes.image_size
    pinned = pipelines.InMemory(*size, pin=True)
    variants: dict[str, Callable[[], Iterator[Pair]]] = {
        "bound": lambda: pipelines.resident(*size, device),
        "ours": lambda: pipelines.stream_prefetch(pinned, device),
        "plain": lambda: pipelines.plain(pinned, device),
    }
    if device.type == "cuda":
        variants["by hand"] = lambda: pipelines.one_ahead(pinned, device)
    if pipelines.has_timm():
        variants["timm"] = lambda: pipelines.timm_prefetch(pinned, device)
    speeds = bench.in_turns(variants)
    bench.add_speeds("copy + float", speeds)
    bench.add_ratio(
        "copy + float: ours / bound", speeds, "ours", "bound", at_least=0.99
    )
    for name in list(variants)[2:]:
        bench.add_ratio(f"copy + float: {name} / bound", speeds, name, "bound")


def measure_loader_with_workers(bench: Bench) -> None:
    """Train over an unpinned DataLoader, and over a pinned one in the plain loop."""
    sizes, device = bench.sizes, bench.device

    def source(*, pin: bool) -> Any:
        return pipelines.data_loader(
            sizes.batch_size, sizes.image_size, num_workers=sizes.num_workers, pin=pin
        )

    variants: dict[str, Callable[[], Iterator[Pair]]] = {
        "plain, pinned": lambda: pipelines.plain(source(pin=True), device),
        "ours, unpinned": lambda: pipelines.stream_prefetch(source(pin=False), device),
        "plain, unpinned": lambda: pipelines.plain(source(pin=False), device),
        "ours, pinned": lambda: pipelines.stream_prefetch(source(pin=True), device),
    }
    speeds = bench.in_turns(variants, steps=sizes.loader_steps)
    title = f"DataLoader, {sizes.num_workers} workers"
    bench.add_speeds(title, speeds)
    bench.add_ratio(
        f"{title}: ours, unpinned / plain, pinned",
        speeds,
        "ours, unpinned",
        "plain, pinned",
        at_least=1.0,
    )
    for name in ("plain, unpinned", "ours, pinned"):
        ratio = f"{title}: {name} / plain, pinned"
        bench.add_ratio(ratio, speeds, name, "plain, pinned")


def measure_kornia_chain(bench: Bench) -> None:
    """Train with a chain of Kornia augmentations: through ours, and in the loop."""
    sizes, device = bench.sizes, bench.device
    pinned = pipelines.InMemory(sizes.batch_size, sizes.image_size, pin=True)
    chain = workloads.kornia_chain(sizes.image_size)

    def serial(images: torch.Tensor) -> torch.Tensor:
        augmented: torch.Tensor = chain(workloads.to_unit_float(images))
        return augmented

    speeds = bench.in_turns(
        {
            "bound": lambda: pipelines.resident(
                sizes.batch_size, sizes.image_size, device
            ),
            "ours": lambda: pipelines.stream_prefetch(pinned, device, chain),
            "serial": lambda: pipelines.plain(pinned, device, serial),
        },
        rounds=min(sizes.rounds, 5),
        steps=max(sizes.steps * 2 // 3, 1),
    )
    bench.add_speeds("Kornia chain", speeds)
    bench.add_ratio("Kornia chain: ours / serial", speeds, "ours", "serial")
    bench.add_ratio("Kornia chain: ours / bound", speeds, "ours", "bound")


def measure_depth(bench: Bench) -> None:
    """Train with different depths over batches in memory."""
    sizes, device = bench.sizes, bench.device
    pinned = pipelines.InMemory(sizes.batch_size, sizes.image_size, pin=True)
    variants: dict[str, Callable[[], Iterator[Pair]]] = {
        f"depth {depth}": lambda depth=depth: pipelines.stream_prefetch(
            pinned, device, depth=depth
        )
        for depth in (1, 2, 3, 4)
    }
    speeds = bench.in_turns(variants)
    bench.add_speeds("copy + float", speeds)
    for depth in (1, 3, 4):
        name = f"copy + float: depth {depth} / depth 2"
        bench.add_ratio(name, speeds, f"depth {depth}", "depth 2")


def measure_host_lead(bench: Bench) -> None:
    """Train with and without the bound on how far the host may be ahead."""
    sizes, device = bench.sizes, bench.device
    pinned = pipelines.InMemory(sizes.batch_size, sizes.image_size, pin=True)
    unbounded = mock.patch.object(host_lead.HostLead, "wait_in_bounds")

    def start(*, is_bounded: bool) -> Iterator[Pair]:
        with nullcontext() if is_bounded else unbounded:
            yield from pipelines.stream_prefetch(pinned, device)

    speeds = bench.in_turns(
        {
            "host lead bounded": lambda: start(is_bounded=True),
            "host lead free": lambda: start(is_bounded=False),
        }
    )
    bench.add_speeds("copy + float", speeds)
    bench.add_ratio(
        "copy + float: host lead bounded / free",
        speeds,
        "host lead bounded",
        "host lead free",
    )


# What has targets comes first: the rest is left out when time is short.
_MEASUREMENTS = (
    measure_overhead,
    measure_copy_and_float,
    measure_loader_with_workers,
    measure_kornia_chain,
    measure_depth,
    measure_host_lead,
)


def run(
    device: torch.device,
    sizes: Sizes,
    budget_s: float,
    measurements: Sequence[Callable[[Bench], None]] = _MEASUREMENTS,
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
        sizes = _TINY
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


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line; see the module's docstring."""
    options = parse_options("must_reach", __doc__ or "").parse_args(arguments)
    return run_with(options, Sizes(), _MEASUREMENTS)


if __name__ == "__main__":
    sys.exit(main())
