"""What does each input pipeline itself cost, over batches that are ready in memory?

Eight uint8 batches in pinned memory are served in turn, so there is no dataset cost.
The bound is the same training step on one batch that lies on the device already.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from benchmarks import pipelines
from benchmarks.chains import (
    kornia_function,
    own_methods_chain,
    own_subclasses_chain,
    per_sample,
)
from benchmarks.dali import dali_prefetch, has_dali
from benchmarks.loops import Trainer
from benchmarks.markdown import costs_table, speeds_table
from benchmarks.plots import draw_speeds
from benchmarks.record import Omission, Record
from benchmarks.seed import TwoStreamLoop
from benchmarks.suite import Group, Place, Promise, Suite
from benchmarks.suites.shared import (
    CHAINED,
    FUNCTION,
    KORNIA,
    SEED_PIPELINED,
    SEED_SERIAL,
    SINGLE,
    VISION,
    VISION_SINGLE,
    ClassificationStep,
    LastingStep,
    over,
)
from gpuprefetch import workloads
from gpuprefetch.augment.fusing import fuse

__all__ = ["SUITE", "groups"]

BOUND = "bound: step alone, batch on the device"
PLAIN = "plain copy, no augmentation"
OURS_COPY = "ours, copy only"
TIMM = "timm PrefetchLoader (copy and normalize only)"
SEED_KORNIA = "seed's two streams, Kornia"
KORNIA_SIDE = "Kornia, one batch ahead on a side stream"
KORNIA_THREAD = "Kornia on a background thread, side stream"
UNFUSED = "ours, Kornia chain that does not fuse"
OWN_METHODS = "ours, the same with methods of its own"
GRAPHED = "ours, chain that does not fuse, graphed"
METHODS_GRAPHED = "ours, with methods of its own, graphed"
DALI = "DALI, external source"

_UNFUSED = (UNFUSED, GRAPHED, OWN_METHODS, METHODS_GRAPHED)
_PROMISED = {BOUND, KORNIA_THREAD, *_UNFUSED, CHAINED}  # All rounds; the others two.


def groups(place: Place) -> Iterator[Group]:
    """Give the groups: batches of 32 and of 128."""
    size = 16 if place.is_tiny else 256
    step = ClassificationStep(size, place.device)
    steps_of = {2: 2} if place.is_tiny else {32: 60, 128: 30}
    for batch_size, steps in steps_of.items():
        yield _group(place, step, size, batch_size, steps)


def _group(
    place: Place, step: LastingStep, size: int, batch_size: int, steps: int
) -> Group:
    source = pipelines.InMemory(batch_size, size, pin=True)
    variants = {
        BOUND: over(lambda: pipelines.resident(batch_size, size, place.device)),
        **_copies(source, place.device),
        **_by_others(source, size, place.device),
        **_by_ours(source, size, place.device),
    }
    if has_dali():
        variants[DALI] = over(lambda: dali_prefetch(batch_size, size, place.device))
    slow = [VISION_SINGLE, SEED_SERIAL, SEED_PIPELINED]
    return Group(
        name="",
        batch_size=batch_size,
        step=step,
        reset=step.reset,
        variants=variants,
        bound=BOUND,
        steps=steps,
        warmup=1 if place.is_tiny else 6,
        rounds=1 if place.is_tiny else 3,
        other_steps=dict.fromkeys(slow, 2 if place.is_tiny else 16),
        fewer_rounds=dict.fromkeys(set(variants) - _PROMISED, 2),
        promises=_promises(batch_size),
        is_probed=batch_size != 128,
    )


def _copies(source: pipelines.InMemory, device: torch.device) -> dict[str, Trainer]:
    """Copy the batches, and augment nothing."""
    variants = {
        PLAIN: over(lambda: pipelines.plain(source, device)),
        OURS_COPY: over(lambda: pipelines.stream_prefetch(source, device)),
    }
    if pipelines.has_timm():
        variants[TIMM] = over(lambda: pipelines.timm_prefetch(source, device))
    return variants


def _by_others(
    source: pipelines.InMemory, size: int, device: torch.device
) -> dict[str, Trainer]:
    """Augment without our loader."""
    by_hand = workloads.batch_chain(size, scale=False)
    kornia = kornia_function(size)
    vision = workloads.worker_chain(size)
    return {
        SEED_SERIAL: over(lambda: pipelines.plain(source, device, by_hand)),
        SEED_PIPELINED: lambda step: TwoStreamLoop(source, by_hand, step, device),
        SEED_KORNIA: lambda step: TwoStreamLoop(source, kornia, step, device),
        KORNIA: over(lambda: pipelines.plain(source, device, kornia)),
        KORNIA_SIDE: over(lambda: pipelines.one_ahead(source, device, kornia)),
        KORNIA_THREAD: over(lambda: pipelines.threaded(source, device, kornia)),
        VISION: over(lambda: pipelines.plain(source, device, vision)),
        VISION_SINGLE: over(
            lambda: pipelines.plain(source, device, partial(per_sample, vision))
        ),
    }


def _by_ours(
    source: pipelines.InMemory, size: int, device: torch.device
) -> dict[str, Trainer]:
    """Augment in our loader."""
    kornia, chain = kornia_function(size), workloads.kornia_chain(size)
    # Made once for all rounds: what is captured in one is there in the next.
    graphed = fuse(own_subclasses_chain(size), kept="graphed")
    methods_graphed = fuse(own_methods_chain(size), kept="graphed")

    def ours(make: Callable[[], pipelines.Transform]) -> Trainer:
        return over(lambda: pipelines.stream_prefetch(source, device, make()))

    return {
        FUNCTION: ours(lambda: kornia),
        UNFUSED: ours(lambda: own_subclasses_chain(size)),
        OWN_METHODS: ours(lambda: own_methods_chain(size)),
        GRAPHED: ours(lambda: graphed),
        METHODS_GRAPHED: ours(lambda: methods_graphed),
        CHAINED: ours(lambda: chain),
        SINGLE: ours(lambda: fuse(chain, resampling="single")),
    }


def _promises(batch_size: int) -> list[Promise]:
    promises = [
        Promise(
            "ours fused / Kornia on a background thread",
            *(CHAINED, KORNIA_THREAD),
            at_least=1.1 if batch_size == 128 else 1.6,
        )
    ]
    if batch_size != 128:
        unfused = "a Kornia chain that does not fuse"
        said_of = {
            UNFUSED: unfused,
            GRAPHED: f"{unfused}, graphed",
            OWN_METHODS: f"{unfused}, with methods of its own",
            METHODS_GRAPHED: f"{unfused}, with methods of its own, graphed",
        }
        promises += [
            Promise(f"{said} / bound", name, BOUND, at_least=0.46, aim=0.75)
            for name, said in said_of.items()
        ]
    return promises


def _omissions() -> list[Omission]:
    missing = []
    if not pipelines.has_timm():
        missing.append(Omission(TIMM, "timm is not installed"))
    if not has_dali():
        missing.append(Omission(DALI, "DALI is not installed"))
    return missing


_SHOWN = (
    *(BOUND, SEED_PIPELINED, KORNIA, KORNIA_THREAD, DALI),
    *(UNFUSED, GRAPHED, CHAINED, SINGLE),
    *(PLAIN, TIMM, OURS_COPY),
)


def _plots(record: Record, folder: Path) -> None:
    draw_speeds(
        record,
        folder / "in-memory.png",
        group="",
        names=_SHOWN,
        heading="The pipeline alone: fraction of the training step without any input",
        of_bound=True,
    )


def _tables(record: Record) -> dict[str, str]:
    smallest = min(case.batch_size for case in record.cases)
    return {
        "readme-in-memory": speeds_table(record, "", names=_SHOWN),
        "in-memory": speeds_table(record, ""),
        "in-memory-costs": costs_table(record, "", smallest),
    }


SUITE = Suite(
    name="in-memory",
    title="the pipeline alone, over batches ready in pinned memory",
    budget_s=95.0,
    groups=groups,
    omissions=_omissions,
    tables=_tables,
    plots=_plots,
)
