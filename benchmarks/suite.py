"""What is a suite of benchmarks, and how is it run?

A suite gives *groups*. A group is a set of variants that are compared with each other:
they take turns, round by round, and each fraction is taken within a round. A suite
whose cases are not training loops adds its cases to the :class:`Run` by itself.

A suite has a budget in seconds. What is not begun by then is left out and listed, and
the record says that it is not complete, so that the next run measures the suite again.
"""

import gc
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from benchmarks.loops import Step, Trainer
from benchmarks.measure import (
    Probe,
    Timing,
    added_bytes,
    allocated_bytes,
    in_turns,
    probe_loop,
    time_loop,
)
from benchmarks.record import Case, Omission, Ratio, Record, Value, ratio_of, spread

__all__ = ["Group", "Place", "Promise", "Run", "Sampler", "Suite", "run_suite"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a suite runs, and how large."""

    device: torch.device
    is_tiny: bool = False
    """Sizes that only show that the code runs; needs no GPU."""


@dataclass(frozen=True, slots=True)
class Promise:
    """A ratio of two variants of one group, and what it should be."""

    name: str
    over: str
    under: str
    at_least: float | None = None
    aim: float | None = None


class Sampler(Protocol):
    """Watches the device while loops run."""

    def between(self, started: float, ended: float) -> float | None:
        """Mean of what it saw between two times of ``time.perf_counter``."""


@dataclass(frozen=True, slots=True)
class Group:
    """Variants that are compared with each other."""

    name: str
    """Empty where the suite has one group for each batch size."""
    batch_size: int
    step: Step
    """The training step of all variants."""
    variants: Mapping[str, Trainer]
    """Name and loop. Nothing is built before a loop is started."""
    bound: str
    """The variant that none can beat; the others are given as fractions of it."""
    steps: int
    """Timed steps in a round."""
    warmup: int
    """Steps before them."""
    rounds: int = 3
    other_steps: Mapping[str, int] = field(default_factory=dict)
    """Timed steps of variants that need another number of them."""
    fewer_rounds: Mapping[str, int] = field(default_factory=dict)
    """Variants that take part in the first rounds only, to save time."""
    promises: Sequence[Promise] = ()
    is_probed: bool = True
    """Whether launches, host and GPU time of each pipeline are looked at as well."""
    extra: Mapping[str, Value] = field(default_factory=dict)
    """Facts that each case of the group carries."""
    reset: Callable[[], None] | None = None
    """Called before each run, so that none inherits what another did to the model."""

    def steps_of(self, name: str) -> int:
        """Timed steps of a variant in a round."""
        return self.other_steps.get(name, self.steps)


@dataclass(frozen=True, slots=True)
class Suite:
    """A question, and what is measured to answer it."""

    name: str
    title: str
    budget_s: float
    """Seconds after which nothing is begun any more."""
    groups: Callable[[Place], Iterator[Group]] | None = None
    """Gives the groups one by one, so that the memory of one is free before the next.
    """
    run: Callable[["Run"], None] | None = None
    """Instead of groups, or after them: adds cases by itself."""
    omissions: Callable[[], Sequence[Omission]] = tuple
    """What cannot be measured here, such as peers that are not installed."""
    watch: Callable[[Place], Any] | None = None
    """Makes a context manager that gives a :class:`Sampler` while the suite runs."""
    tables: Callable[[Record], Mapping[str, str]] | None = None
    """Markdown of the tables that show a record, by the name of their marker."""
    plots: Callable[[Record, Path], None] | None = None
    """Draws the pictures of a record into a folder."""


class Run:
    """A suite that is running: its clock, and its record so far.

    Args:
        suite: What runs.
        place: Where.
        machine: What is known of it; see ``machine.describe_machine``.
        save: Called with the record after each group, so that little is lost.
    """

    def __init__(
        self,
        suite: Suite,
        place: Place,
        machine: Mapping[str, Value],
        save: Callable[[Record], None],
    ) -> None:
        self.suite = suite
        self.place = place
        self.extra: dict[str, Value] = {}
        self.sampler: Sampler | None = None
        self._machine = machine
        self._save = save
        self._started = time.monotonic()
        self._cases: list[Case] = []
        self._ratios: list[Ratio] = []
        self._omitted: list[Omission] = list(suite.omissions())
        self._is_whole = True
        # Earlier suites of this process leave some behind: buffers of libraries that
        # keep one for each stream.
        self._bytes_before = allocated_bytes(place.device)

    # For suites #

    @property
    def seconds(self) -> float:
        """Time since the start."""
        return time.monotonic() - self._started

    @property
    def has_time(self) -> bool:
        """Tell whether something may still be begun."""
        return self.seconds < self.suite.budget_s

    def add(self, case: Case) -> None:
        """Keep a case and print it."""
        self._cases.append(case)
        share = "" if case.of_bound is None else f"{case.of_bound:8.1%} of the bound"
        name = f"{case.group}, {case.name}" if case.group else case.name
        self.say(
            f"B={case.batch_size:<4d} {name:60s} {case.steps_per_s:9.2f} steps/s{share}"
        )

    def add_ratio(
        self,
        name: str,
        ratios: Sequence[float],
        *,
        group: str,
        batch_size: int,
        at_least: float | None = None,
        aim: float | None = None,
    ) -> None:
        """Keep the ratios of single rounds and print their median."""
        value, quartiles = spread(ratios)
        ratio = Ratio(
            *(name, group, batch_size, value, quartiles, len(ratios)),
            at_least=at_least,
            aim=aim,
        )
        self._ratios.append(ratio)
        target = "" if at_least is None else f"  target {at_least:g}"
        verdict = {None: "", True: "  ok", False: "  MISSED"}[ratio.passed]
        self.say(f"B={batch_size:<4d} {name:60s} {value:9.3f} x{target}{verdict}")

    def omit(self, name: str, reason: str, *, is_a_gap: bool = True) -> None:
        """Note what was not measured.

        Args:
            name: Of the case or group.
            reason: A short sentence, or a traceback, whose last line is kept.
            is_a_gap: Whether the suite is incomplete without it.
        """
        self._omitted.append(Omission(name, reason.strip().splitlines()[-1]))
        self._is_whole = self._is_whole and not is_a_gap
        self.say(f"not measured: {name}: {reason}")

    def attempt(self, name: str, work: Callable[[], None]) -> None:
        """Do a part of the suite if there is time; note it if it fails."""
        if not self.has_time:
            self.omit(name, f"{self.suite.budget_s:.0f} s were over")
            return
        try:
            work()
        except Exception:  # One variant must not take the others with it.
            self.omit(name, traceback.format_exc())

    def say(self, text: str) -> None:
        """Print a line."""
        print(f"{self.seconds:6.1f} s  {self.suite.name:20s} {text}", flush=True)

    def compare(self, group: Group) -> None:
        """Measure the variants of a group in turns, and keep their cases."""
        timings: dict[str, list[Timing]] = {name: [] for name in group.variants}

        def run_once(name: str) -> None:
            trainer = group.variants[name]
            if group.reset is not None:
                group.reset()
            timing = time_loop(
                lambda: trainer(group.step),
                self.place.device,
                steps=group.steps_of(name),
                warmup=group.warmup,
            )
            timings[name].append(timing)
            self.say(_title(group, f"{name}: {timing.steps_per_s:.1f} steps/s"))

        failed = set()
        for number, name in in_turns(list(group.variants), group.rounds):
            if number >= group.fewer_rounds.get(name, group.rounds) or name in failed:
                continue
            before = len(self._omitted)
            self.attempt(
                _title(group, f"{name}, round {number + 1}"), _bind(run_once, name)
            )
            if len(self._omitted) > before:
                failed.add(name)
        probes = self._probe(group, timings) if group.is_probed else {}
        self._keep(group, timings, probes)
        self.save()

    # Inside #

    def _probe(
        self, group: Group, timings: Mapping[str, list[Timing]]
    ) -> dict[str, Probe]:
        probes: dict[str, Probe] = {}

        def probe(name: str) -> None:
            probes[name] = probe_loop(group.variants[name], self.place.device)

        for name, done in timings.items():
            if done:
                self.attempt(_title(group, f"{name}, launches"), _bind(probe, name))
        return probes

    def _keep(
        self,
        group: Group,
        timings: Mapping[str, list[Timing]],
        probes: Mapping[str, Probe],
    ) -> None:
        speeds = {
            name: [timing.steps_per_s for timing in done]
            for name, done in timings.items()
        }
        for name, done in timings.items():
            if done:
                self.add(self._case(group, name, done, speeds, probes.get(name)))
        for promise in group.promises:
            ratios = ratio_of(speeds[promise.over], speeds[promise.under])
            if ratios:
                self.add_ratio(
                    promise.name,
                    ratios,
                    group=group.name,
                    batch_size=group.batch_size,
                    at_least=None if self.place.is_tiny else promise.at_least,
                    aim=None if self.place.is_tiny else promise.aim,
                )

    def _case(
        self,
        group: Group,
        name: str,
        timings: Sequence[Timing],
        speeds: Mapping[str, Sequence[float]],
        probe: Probe | None,
    ) -> Case:
        median, quartiles = spread(speeds[name])
        bound = speeds[group.bound]
        ratios = ratio_of(speeds[name], bound)
        extra: dict[str, Value] = {**group.extra, "timed_steps": group.steps_of(name)}
        if self.sampler is not None:
            extra["gpu_utilization_percent"] = _mean(
                self.sampler.between(one.started, one.ended) for one in timings
            )
        return Case(
            name=name,
            group=group.name,
            batch_size=group.batch_size,
            steps_per_s=median,
            quartiles=quartiles,
            repeats=len(timings),
            samples=tuple(speeds[name]),
            bound_steps_per_s=spread(bound)[0] if bound else None,
            of_bound=spread(ratios)[0] if ratios else None,
            gpu_ms=probe.gpu_ms if probe else None,
            host_ms=probe.host_ms if probe else None,
            launches=probe.launches if probe else None,
            host_syncs=probe.host_syncs if probe else None,
            peak_device_bytes=_most(
                added_bytes(one.peak_device_bytes, self._bytes_before)
                for one in timings
            ),
            pinned_bytes=_most(one.pinned_bytes for one in timings),
            extra=extra,
        )

    def record(self, *, is_over: bool = False) -> Record:
        """Give what is known so far."""
        return Record(
            suite=self.suite.name,
            device=self.place.device.type,
            is_tiny=self.place.is_tiny,
            is_complete=is_over and self._is_whole,
            seconds=self.seconds,
            machine=self._machine,
            cases=tuple(self._cases),
            ratios=tuple(self._ratios),
            omitted=tuple(self._omitted),
            extra=self.extra,
        )

    def save(self, *, is_over: bool = False) -> None:
        """Write down what is known so far."""
        self._save(self.record(is_over=is_over))


def run_suite(
    suite: Suite,
    place: Place,
    machine: Mapping[str, Value],
    save: Callable[[Record], None],
) -> Record:
    """Run a suite to its end, however some of its parts end.

    Args:
        suite: What to measure.
        place: Where.
        machine: What the record says of it.
        save: Gets the record so far, several times.

    Returns:
        The record.
    """
    torch.manual_seed(0)
    # What was imported lives on; without it, collecting between two runs is quick.
    gc.collect()
    gc.freeze()
    run = Run(suite, place, machine, save)
    if suite.watch is None:
        _run_parts(run)
    else:
        with suite.watch(place) as run.sampler:
            _run_parts(run)
    gc.unfreeze()
    run.save(is_over=True)
    return run.record(is_over=True)


def _run_parts(run: Run) -> None:
    if run.suite.groups is not None:
        try:
            for group in run.suite.groups(run.place):
                if not run.has_time:
                    run.omit("further groups", f"{run.suite.budget_s:.0f} s were over")
                    break
                run.compare(group)
                del group
        except Exception:  # While a group was built: the rest of them is lost.
            run.omit("further groups", traceback.format_exc())
    if run.suite.run is not None:
        run.attempt(run.suite.name, lambda: run.suite.run(run))  # type: ignore[misc]


def _title(group: Group, name: str) -> str:
    return ", ".join(
        part for part in (f"B={group.batch_size}", group.name, name) if part
    )


def _bind(work: Callable[[str], None], name: str) -> Callable[[], None]:
    return lambda: work(name)


def _most(values: Iterator[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _mean(values: Iterator[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
