"""Does the loader help this training loop, by how much, and what limits the rest?

:func:`probe` measures the parts alone (loader, step, transform) and two loops over the
same batches: the plain one, and ours. The loops take turns, round by round, so that
whatever else the machine does hits both; :mod:`gpuprefetch.gain` says what their ratios
are worth.

[Note: What is expected]
Where copies and transforms run beside the loop, a step cannot take less than the
slowest of its parts alone. Elsewhere they take turns in either loop, and only worker
processes run beside them: no gain is to be expected from overlap.

A loop that is faster than the parts it consists of shows that the parts, which are
measured once, were disturbed. A loop on a CPU that takes many times as long as its
parts in turn shows that they hinder each other: worker processes, and the threads that
torch computes with, compete for the cores.
"""

from collections.abc import Callable, Generator, Hashable, Iterable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import islice
from statistics import median, median_low
from time import perf_counter
from typing import Any, Literal

import torch

from gpuprefetch.batch import map_leaves
from gpuprefetch.diagnose import diagnose
from gpuprefetch.errors import SettingError
from gpuprefetch.gain import Gain, interval_of_median
from gpuprefetch.kinds import is_fused_module, is_kornia_module
from gpuprefetch.loader import StreamPrefetchLoader
from gpuprefetch.move import move_leaf
from gpuprefetch.selection import Selection
from gpuprefetch.stats import LoaderStats
from gpuprefetch.streams import is_asynchronous
from gpuprefetch.thresholds import (
    CROWDED,
    CROWDED_MS,
    FEWEST_BATCHES,
    NOTHING_TO_GAIN,
)
from gpuprefetch.workloads import to_unit_float

__all__ = ["Effort", "Probe", "probe"]

Batches = Generator[Any, None, None]

# Batches before the clock starts, beside those that workers have ready.
_FEWEST_WARMUP = 3


@dataclass(frozen=True, slots=True)
class Effort:
    """How long the measurement is."""

    rounds: int = 6
    """Turns of each loop. Six are the fewest whose range covers the median in 95 % of
    all measurements."""
    batches: int | None = None
    """Batches on the clock in each round; ``None``: as many as ``budget_s`` allows."""
    budget_s: float = 40.0
    """Time for the rounds of both loops together, about."""


@dataclass(frozen=True, slots=True)
class Probe:
    """What was measured, in ms a batch."""

    device: str
    """Where batches went."""
    rounds: int
    """Turns of each loop."""
    batches: int
    """Batches on the clock in each round."""
    loader_ms: float
    """The source alone, with nothing done to its batches."""
    step_ms: float
    """The step alone, on one batch that lies on the device already."""
    transform_ms: float | None
    """The transform alone, as the plain loop runs it; ``None`` without one."""
    plain_ms: float
    """The plain loop: move, transform, step. The middle round's; of an even number of
    rounds, the faster of the middle two."""
    ours_ms: float
    """The same through the loader, in the middle round of its own."""
    limit: Literal["loader", "step", "all parts in turn"]
    """Which part bounds a step; see [Note: What is expected]."""
    limit_ms: float
    """How long that takes."""
    is_overlapped: bool
    """Copies and transforms run beside the loop on that device."""
    gain: Gain
    """What was gained."""
    verdict: str
    """What holds the loop back behind the loader, in the round of ``ours_ms``."""
    figure: str
    """The numbers that say so."""
    advice: str
    """The one setting to change next."""

    @property
    def expected_gain(self) -> float | None:
        """The most that overlap could gain, by the parts alone; ``None``: nothing
        overlaps there, or the parts contradict the loops.
        """
        if not self.is_overlapped or self.is_contradicted:
            return None
        return self.plain_ms / max(self.limit_ms, 1e-9)

    @property
    def is_contradicted(self) -> bool:
        """Whether a loop was faster than the parts it consists of: too noisy."""
        return self.fastest_ms < (1.0 - NOTHING_TO_GAIN) * self.limit_ms

    @property
    def is_crowded(self) -> bool:
        """Whether a loop took many times as long as its parts alone, on a CPU."""
        excess_ms = self.slowest_ms - self.alone_ms
        is_slow = self.slowest_ms > CROWDED * self.alone_ms
        return not self.is_overlapped and is_slow and excess_ms > CROWDED_MS

    @property
    def alone_ms(self) -> float:
        """All parts alone, one after the other."""
        return self.loader_ms + self.step_ms + (self.transform_ms or 0.0)

    @property
    def slowest_ms(self) -> float:
        """The slower of the loops."""
        return max(self.plain_ms, self.ours_ms)

    @property
    def fastest_ms(self) -> float:
        """The faster of the loops that the limit holds for."""
        # In turn it has the transform as the plain loop runs it: ours may be fused.
        return min(self.plain_ms, self.ours_ms) if self.is_overlapped else self.plain_ms

    def as_dict(self) -> dict[str, Any]:
        """Give all of it in values that JSON knows."""
        return {
            **asdict(self),
            "expected_gain": self.expected_gain,
            "is_contradicted": self.is_contradicted,
            "is_crowded": self.is_crowded,
            "answer": self.gain.answer,
        }


def probe(
    source: Iterable[Any],
    step: Callable[[Any], object],
    transform: Callable[..., Any] | None = None,
    *,
    inputs: Hashable | None = None,
    device: torch.device,
    effort: Effort = Effort(),
) -> Probe:
    """Measure a training loop with and without the loader.

    Args:
        source: A DataLoader, or any re-iterable of batches.
        step: Called with each batch on the device, transformed.
        transform: As for ``StreamPrefetchLoader``.
        inputs: As for ``StreamPrefetchLoader``.
        device: Where to train, with an index.
        effort: How long to measure.

    Raises:
        SettingError: ``source`` is empty, can be iterated once only, or is behind a
            loader of ours already.
    """
    if isinstance(source, StreamPrefetchLoader):
        raise SettingError(
            f"the loader is a {type(source).__name__} already, and the plain loop is "
            "needed beside it. Pass the DataLoader that it wraps, and its transform."
        )
    if isinstance(source, Iterator):
        raise SettingError(
            f"the loader is a {type(source).__name__}, which can be iterated once; it "
            "is needed several times. Pass a DataLoader, or a function that makes one."
        )
    parts = _Parts(source, step, transform, inputs, device)
    num_batches = effort.batches or parts.batches_for(effort)
    loader_ms = parts.time(parts.bare(), num_batches, None)
    ready = next(parts.ours())
    step_ms = parts.time(_repeat(ready), num_batches, step)
    transform_ms = None
    if transform is not None:
        moved = parts.move(next(parts.bare()))
        transform_ms = parts.time(_repeat(moved), num_batches, parts.apply)
    plain: list[float] = []
    ours: list[float] = []
    figures: list[LoaderStats] = []
    for number in range(effort.rounds):
        turns = [(plain, parts.plain), (ours, parts.ours)]
        for times_ms, start in turns if number % 2 else reversed(turns):
            times_ms.append(parts.time(start(), num_batches, step))
        figures.append(parts.take_figures())
    # Rounds that ran, not means of two: the verdict is of the one that is shown.
    plain_ms, ours_ms = median_low(plain), median_low(ours)
    diagnosis = diagnose(figures[ours.index(ours_ms)])
    gains = [a / b for a, b in zip(plain, ours, strict=True)]
    limit, limit_ms = parts.limit(loader_ms, step_ms, transform_ms)
    return Probe(
        device=str(device),
        rounds=effort.rounds,
        batches=num_batches,
        loader_ms=loader_ms,
        step_ms=step_ms,
        transform_ms=transform_ms,
        plain_ms=plain_ms,
        ours_ms=ours_ms,
        limit=limit,
        limit_ms=limit_ms,
        is_overlapped=is_asynchronous(device),
        gain=Gain(median(gains), *interval_of_median(gains)),
        verdict=diagnosis.verdict,
        figure=diagnosis.figure,
        advice=diagnosis.advice,
    )


def _repeat(batch: Any) -> Batches:
    while True:
        yield batch


class _Parts:
    """The loops that are compared, and how one of them is timed."""

    def __init__(
        self,
        source: Iterable[Any],
        step: Callable[[Any], object],
        transform: Callable[..., Any] | None,
        inputs: Hashable | None,
        device: torch.device,
    ) -> None:
        self._source = source
        self._step = step
        self._transform = transform
        self._selection = Selection(inputs)
        self._device = device
        self._loader: StreamPrefetchLoader[Any] = StreamPrefetchLoader(
            source, transform, inputs=inputs, device=device
        )
        # Of the loader's longest pass since they were taken.
        self._figures = LoaderStats()
        self._num_workers = int(getattr(source, "num_workers", 0) or 0)
        prefetched = self._num_workers * int(getattr(source, "prefetch_factor", 2) or 2)
        self._warmup = max(_FEWEST_WARMUP, prefetched)

    # Loops #

    def bare(self) -> Batches:
        """The source's batches, pass after pass."""
        return _pass_after_pass(self._source)

    def ours(self) -> Batches:
        """The batches that the loader gives."""
        try:
            yield from _pass_after_pass(self._loader, self._note_figures)
        finally:
            self._note_figures()

    def _note_figures(self) -> None:
        newest = self._loader.stats()
        if newest.batches >= self._figures.batches:
            self._figures = newest

    def take_figures(self) -> LoaderStats:
        """Give those of the loader's longest pass since this was called last."""
        taken, self._figures = self._figures, LoaderStats()
        return taken

    def plain(self) -> Batches:
        """The batches as a plain loop makes them."""
        with closing(self.bare()) as batches:
            for batch_host in batches:
                batch = self.move(batch_host)
                yield batch if self._transform is None else self.apply(batch)

    def move(self, batch_host: Any) -> Any:
        """Copy a batch to the device, as ``x.to(device, non_blocking=True)`` does."""

        def move_one(leaf: Any) -> Any:
            return move_leaf(
                leaf, batch=batch_host, device=self._device, non_blocking=True
            )

        return map_leaves(batch_host, move_one)

    def apply(self, batch: Any) -> Any:
        """Run the transform in the loop, on the loop's stream."""
        transform = self._transform
        assert transform is not None
        inputs = self._selection.take(batch)
        if is_kornia_module(transform) or is_fused_module(transform):
            # What a user of Kornia has to write.
            inputs = tuple(map(_scaled, inputs))
        with torch.no_grad():
            return self._selection.put(batch, transform(*inputs))

    # The clock #

    def time(
        self,
        batches: Batches,
        num_batches: int,
        work: Callable[[Any], object] | None,
    ) -> float:
        """Give the ms a batch, device time included."""
        with closing(batches):
            self._run(batches, self._warmup, work)
            started_s = perf_counter()
            self._run(batches, num_batches, work)
            return (perf_counter() - started_s) / num_batches * 1e3

    def _run(
        self,
        batches: Iterator[Any],
        num_batches: int,
        work: Callable[[Any], object] | None,
    ) -> None:
        for batch in islice(batches, num_batches):
            if work is not None:
                work(batch)
        if self._device.type not in ("cpu", "meta"):
            torch.accelerator.synchronize(self._device)

    def batches_for(self, effort: Effort) -> int:
        """Choose how many batches a round has, by a first short run."""
        batch_ms = self.time(self.plain(), _FEWEST_WARMUP, self._step)
        fitting = effort.budget_s * 1e3 / (2 * effort.rounds * max(batch_ms, 1e-3))
        return int(min(max(fitting - self._warmup, 2 * FEWEST_BATCHES), 200))

    # What it means #

    def limit(
        self, loader_ms: float, step_ms: float, transform_ms: float | None
    ) -> tuple[Literal["loader", "step", "all parts in turn"], float]:
        """Name what bounds a step; see [Note: What is expected]."""
        if is_asynchronous(self._device):
            if loader_ms > step_ms:
                return "loader", loader_ms
            return "step", step_ms
        in_turn = step_ms + (transform_ms or 0.0)
        if not self._num_workers:
            return "all parts in turn", in_turn + loader_ms
        if loader_ms > in_turn:
            return "loader", loader_ms
        return "all parts in turn", in_turn


def _scaled(value: Any) -> Any:
    is_image = isinstance(value, torch.Tensor) and value.dtype == torch.uint8
    return to_unit_float(value) if is_image else value


def _pass_after_pass(
    source: Iterable[Any], after_pass: Callable[[], None] | None = None
) -> Batches:
    """Yield batches for ever.

    Raises:
        SettingError: A pass has none.
    """
    while True:
        is_empty = True
        for batch in source:
            is_empty = False
            yield batch
        if after_pass is not None:
            after_pass()
        if is_empty:
            raise SettingError("the loader gives no batches. Pass one with data in it.")
