"""How is a trace of a training loop recorded, and which figures are in it?

Two loops over batches in memory, with the same step and the same fused augmentation:
``ours`` through the loader, and ``plain``, in which nothing can be hidden.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from benchmarks import pipelines
from benchmarks.loops import Step
from benchmarks.measure import synchronize
from benchmarks.pipelines import Pair
from benchmarks.record import Value, spread
from gpuprefetch import workloads
from gpuprefetch.augment.fusing import fuse
from gpuprefetch.overlap import Overlap

__all__ = [
    "DEPTH",
    "TINY",
    "Pipeline",
    "Sizes",
    "figures_of",
    "record_trace",
    "shares_of",
    "start_pipeline",
]

Pipeline = Literal["ours", "plain"]

DEPTH = 2  # Of the loader: its default.

# Before and while the profiler warms up, so that it sees neither a kernel's compilation
# nor the choice of an algorithm, and the host is ahead by as much as it will be.
_WARMUP_STEPS, _PROFILER_WARMUP_STEPS = 15, 5


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is recorded."""

    image_size: int = 256
    batch_size: int = 128
    """The profiler takes the host as long as a step with 32 images takes the GPU. Then
    the host comes ahead too slowly for a trace of 20 steps."""
    steps: int = 20


TINY = Sizes(image_size=16, batch_size=2, steps=3)


def start_pipeline(
    name: Pipeline, sizes: Sizes, device: torch.device
) -> Iterator[Pair]:
    """Start one of the two pipelines, over batches in memory."""
    source = pipelines.InMemory(sizes.batch_size, sizes.image_size, pin=True)
    chain = workloads.kornia_chain(sizes.image_size)
    if name == "ours":
        return pipelines.stream_prefetch(source, device, chain, depth=DEPTH)
    return pipelines.plain(source, device, fuse(chain))


def record_trace(
    batches: Iterator[Pair],
    step: Step,
    path: Path,
    *,
    device: torch.device,
    steps: int,
) -> list[float]:
    """Train, and let the profiler write a trace of some steps in the middle.

    Args:
        batches: Enough of them; closed at the end.
        step: One step of training.
        path: Of the trace; compressed if it ends with ``.gz``.
        device: Where it runs.
        steps: How many are recorded.

    Returns:
        Steps in a second, one number for each step but the last, as the loop's thread
        saw them.
    """
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    for _ in range(_WARMUP_STEPS):
        step(*next(batches))
    begun: list[float] = []
    with profile(
        activities=activities,
        schedule=schedule(
            wait=0, warmup=_PROFILER_WARMUP_STEPS, active=steps, repeat=1
        ),
        on_trace_ready=lambda done: done.export_chrome_trace(str(path)),
    ) as profiler:
        for _ in range(_PROFILER_WARMUP_STEPS + steps):
            begun.append(time.perf_counter())
            step(*next(batches))
            profiler.step()
    synchronize(device)
    batches.close()  # type: ignore[attr-defined]
    recorded = begun[_PROFILER_WARMUP_STEPS:]
    return [1 / (later - earlier) for earlier, later in pairwise(recorded)]


def figures_of(overlap: Overlap) -> dict[str, Any]:
    """Give what was found, batch by batch, in values that JSON knows."""
    return {
        **shares_of(overlap),
        "side_stream": overlap.side_stream,
        "consumer_stream": overlap.consumer_stream,
        "batches": [
            {
                "used_by_step": batch.step_index,
                "inside_step": batch.inside_step,
                "copy_us": round(batch.copy_us, 2),
                "hidden_copy_us": round(batch.hidden_copy_us, 2),
                "transform_us": round(batch.transform_us, 2),
                "hidden_transform_us": round(batch.hidden_transform_us, 2),
            }
            for batch in overlap.batches
        ],
        "steps": [
            {
                "kernels": len(step.works),
                "start_us": round(step.start_us, 2),
                "end_us": round(step.end_us, 2),
            }
            for step in overlap.steps
        ],
    }


def shares_of(overlap: Overlap) -> dict[str, Value]:
    """Sum up what was found; times are medians over the batches."""

    def per_batch(times_us: Iterator[float]) -> float | None:
        known = list(times_us)
        return round(spread(known)[0], 2) if known else None

    ahead = [
        batch.step_index - batch.inside_step
        for batch in overlap.steady_batches
        if batch.inside_step is not None and batch.inside_step >= 0
    ]
    return {
        "copy_us": per_batch(batch.copy_us for batch in overlap.batches),
        "transform_us": per_batch(batch.transform_us for batch in overlap.batches),
        "hidden_share": overlap.hidden_share,
        "copy_hidden_share": overlap.copy_hidden_share,
        "transform_hidden_share": overlap.transform_hidden_share,
        "inside_share": overlap.inside_share,
        "idle_share": overlap.idle_share,
        "num_batches": len(overlap.steady_batches),
        "num_steps": len(overlap.steps),
        "median_steps_ahead": spread(ahead)[0] if ahead else None,
    }
