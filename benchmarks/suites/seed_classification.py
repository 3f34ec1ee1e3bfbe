"""Part 2 of the seed: training with augmentation behind a DataLoader of noise images.

The seed's model, data set (noise images, drawn in the workers), chain and loops, then
Kornia, then ours. The bound is the plain loop over a pinned DataLoader without any
augmentation, in the same run: busy workers slow the training process down.

Only the steady state counts. Each round times at least ten times as many batches as
workers and loader can have ready. From 64 images on, a worker prepares one batch ahead
instead of the usual two (``prefetch_factor``), for all variants, to keep rounds short.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from benchmarks import pipelines
from benchmarks.chains import kornia_function
from benchmarks.loops import Trainer
from benchmarks.markdown import speed_cell, speeds_table
from benchmarks.plots import draw_speeds
from benchmarks.record import Case, Record
from benchmarks.seed import ImagesAndLabels, TwoStreamLoop, make_loader
from benchmarks.suite import Group, Place, Promise, Suite
from benchmarks.suites.shared import (
    CHAINED,
    FUNCTION,
    KORNIA,
    SEED_PIPELINED,
    SEED_SERIAL,
    SINGLE,
    ClassificationStep,
    LastingStep,
    over,
)
from benchmarks.utilization import watch_utilization
from gpuprefetch import workloads
from gpuprefetch.augment.fusing import fuse

__all__ = ["SUITE", "Cell", "cells", "groups", "promises"]

_AHEAD = 4  # Batches that our loader holds: its depth, and two more from workers.

BOUND = "plain loop, pinned, no augmentation"
IN_WORKERS = "seed, augmentation in the workers"
KORNIA_PINNED = f"{KORNIA}, pinned"
UNPINNED = "plain loop, unpinned, no augmentation"
PIPELINED_PINNED = f"{SEED_PIPELINED}, pinned"
CHAINED_PINNED = f"{CHAINED}, pinned"


@dataclass(frozen=True, slots=True)
class Cell:
    """One group: how it is loaded, and what is compared in it."""

    batch_size: int
    num_workers: int
    prefetch_factor: int
    rounds: int
    names: tuple[str, ...]
    once: tuple[str, ...] = ()
    """Measured in the first round only."""

    @property
    def prefetched(self) -> int:
        """Batches that may be ready when the clock starts."""
        return self.num_workers * self.prefetch_factor + _AHEAD

    def steps_of(self, name: str) -> int:
        """Timed steps of a variant: ten times what it can have ready."""
        # The workers' own augmented batches come in bursts of as many as there are
        # workers, so that whole bursts are counted.
        return 10 * (self.prefetched - (_AHEAD if name == IN_WORKERS else 0))


_USUAL = (BOUND, IN_WORKERS, SEED_SERIAL, SEED_PIPELINED, KORNIA_PINNED, CHAINED)


def cells(place: Place) -> list[Cell]:
    """Plan the groups, the most telling ones first, since time may run out."""
    if place.is_tiny:
        names = (*_USUAL, FUNCTION, SINGLE, UNPINNED, PIPELINED_PINNED, CHAINED_PINNED)
        return [Cell(2, 1, 1, 1, names)]
    promised = (BOUND, IN_WORKERS, SEED_PIPELINED, CHAINED)
    once = SEED_SERIAL, KORNIA_PINNED, FUNCTION, SINGLE, UNPINNED
    more = PIPELINED_PINNED, CHAINED_PINNED
    all_cores = max(os.cpu_count() or 8, 8)
    found = [Cell(32, 8, 2, 3, (*promised, *once, *more), (*once, *more))]
    if all_cores > 8:
        found.append(Cell(32, all_cores, 1, 1, (*promised, SINGLE, CHAINED_PINNED)))
    found.append(Cell(16, 8, 2, 1, (*_USUAL, FUNCTION, SINGLE)))
    found.append(Cell(128, 8, 1, 1, _USUAL))
    found.append(Cell(64, 8, 1, 1, _USUAL))
    found.append(Cell(256, 8, 1, 1, promised))
    return found


def groups(place: Place) -> Iterator[Group]:
    """Give a group for each batch size and number of workers."""
    size = 16 if place.is_tiny else 256
    step = ClassificationStep(size, place.device)
    for cell in cells(place):
        yield _group(place, step, size, cell)


def _group(place: Place, step: LastingStep, size: int, cell: Cell) -> Group:
    trainers = _trainers(place, size, cell)
    return Group(
        name=f"{cell.num_workers} workers",
        batch_size=cell.batch_size,
        step=step,
        reset=step.reset,
        variants={name: trainers[name] for name in cell.names},
        bound=BOUND,
        steps=2 if place.is_tiny else cell.steps_of(BOUND),
        other_steps={} if place.is_tiny else {IN_WORKERS: cell.steps_of(IN_WORKERS)},
        warmup=1 if place.is_tiny else cell.prefetched - _AHEAD,
        rounds=cell.rounds,
        fewer_rounds=dict.fromkeys(cell.once, 1),
        promises=promises(cell),
        is_probed=False,
        extra={
            "workers": cell.num_workers,
            "prefetch_factor": cell.prefetch_factor,
            "prefetched_batches": cell.prefetched,
        },
    )


def _trainers(place: Place, size: int, cell: Cell) -> dict[str, Trainer]:
    device = place.device
    raw = ImagesAndLabels(size)
    augmenting = ImagesAndLabels(size, workloads.worker_chain(size, scale=False))
    by_hand = workloads.batch_chain(size, scale=False)
    kornia = kornia_function(size)
    chain = workloads.kornia_chain(size)
    single = fuse(chain, resampling="single")

    def load(dataset: ImagesAndLabels = raw, *, pin: bool = False) -> Any:
        return make_loader(
            dataset,
            cell.batch_size,
            num_workers=cell.num_workers,
            prefetch_factor=cell.prefetch_factor,
            pin=pin,
        )

    def plain(transform: pipelines.Transform, **settings: Any) -> Trainer:
        return over(lambda: pipelines.plain(load(**settings), device, transform))

    def two_streams(**settings: Any) -> Trainer:
        return lambda step: TwoStreamLoop(load(**settings), by_hand, step, device)

    def ours(transform: Callable[..., Any], **settings: Any) -> Trainer:
        return over(
            lambda: pipelines.stream_prefetch(load(**settings), device, transform)
        )

    return {
        BOUND: plain(pipelines.to_float, pin=True),
        UNPINNED: plain(pipelines.to_float),
        IN_WORKERS: plain(nn.Identity(), dataset=augmenting),
        SEED_SERIAL: plain(by_hand),
        SEED_PIPELINED: two_streams(),
        PIPELINED_PINNED: two_streams(pin=True),
        KORNIA_PINNED: plain(kornia, pin=True),
        FUNCTION: ours(kornia),
        CHAINED: ours(chain),
        CHAINED_PINNED: ours(chain, pin=True),
        SINGLE: ours(single),
    }


def promises(cell: Cell) -> list[Promise]:
    """Say what is compared in a group, and what it should be."""
    over_workers = "ours fused / seed in the workers", CHAINED, IN_WORKERS
    over_pipelined = "ours fused / seed pipelined", CHAINED, SEED_PIPELINED
    if cell.num_workers != 8 or cell.batch_size != 32:
        return [Promise(*over_workers), Promise(*over_pipelined)]
    return [
        Promise(*over_workers, at_least=5.0, aim=6.0),
        Promise(*over_pipelined, at_least=2.0, aim=2.4),
        Promise("ours fused / bound", CHAINED, BOUND, at_least=0.97, aim=1.0),
        Promise("seed pipelined / seed in the workers", SEED_PIPELINED, IN_WORKERS),
    ]


# Pages #


def _with_utilization(case: Case) -> str:
    busy = case.extra.get("gpu_utilization_percent")
    return speed_cell(case) + ("" if busy is None else f", GPU {busy:.0f} %")


def _tables(record: Record) -> dict[str, str]:
    groups = list(dict.fromkeys(case.group for case in record.cases))
    parts = [
        f"**{group}**\n\n" + speeds_table(record, group, cell=_with_utilization)
        for group in groups
    ]
    return {
        "seed-classification": "\n\n".join(parts),
        "readme-workers": speeds_table(record, groups[0], names=_SHOWN),
    }


_SHOWN = (IN_WORKERS, SEED_SERIAL, SEED_PIPELINED, KORNIA_PINNED, CHAINED, BOUND)


def _plots(record: Record, folder: Path) -> None:
    draw_speeds(
        record,
        folder / "seed-classification.png",
        group="8 workers",
        names=_SHOWN,
        heading="Training behind a DataLoader with 8 workers, steps/s",
    )


SUITE = Suite(
    name="seed-classification",
    title="the seed's part 2: augmentation behind a DataLoader that makes images",
    budget_s=220.0,
    groups=groups,
    watch=watch_utilization,
    tables=_tables,
    plots=_plots,
)
