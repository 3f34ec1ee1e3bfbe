"""Do copy and augmentation of the next batch run beside the training step?

    python -m benchmarks.overlap --out-dir DIR [--tiny]

Records a profiler's trace of 20 steps through the loader, and of 20 steps of the plain
loop with the same augmentation, over batches in memory. Writes for each of the two the
trace, the figures batch by batch as JSON, and a picture; and the record of the suite
``overlap``. A profiler slows the host, so the speeds here are no speeds of training.
"""

import argparse
import dataclasses
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from benchmarks import pipelines
from benchmarks.loops import Step
from benchmarks.machine import describe_machine
from benchmarks.measure import synchronize
from benchmarks.pipelines import Pair
from benchmarks.record import Case, Value, spread, write_record
from benchmarks.suite import Place, Run, Suite, run_suite
from gpuprefetch import workloads
from gpuprefetch.augment.fused import fuse
from gpuprefetch.overlap import Overlap, find_overlap
from gpuprefetch.timeline import save_timeline
from gpuprefetch.trace import read_trace

__all__ = [
    "DEPTH",
    "OURS",
    "PLAIN",
    "figures_of",
    "main",
    "measure",
    "record_trace",
    "start_pipeline",
    "training_step",
]

OURS, PLAIN = "ours, fused", "plain loop, fused"
DEPTH = 2  # Of the loader: its default.

# Before and while the profiler warms up, so that it sees neither a kernel's compilation
# nor the choice of an algorithm, and the host is ahead by as much as it will be.
_WARMUP_STEPS, _PROFILER_WARMUP_STEPS = 15, 5
_FILE_NAMES = {OURS: "ours", PLAIN: "plain"}


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """How much is recorded."""

    image_size: int = 256
    batch_size: int = 32
    steps: int = 20


_TINY = Sizes(image_size=16, batch_size=2, steps=3)


def training_step(image_size: int, device: torch.device) -> Step:
    """Build the model and its step; it does the work and changes no weight."""
    model = workloads.build_model(image_size, pipelines.NUM_CLASSES).to(device)
    return workloads.TrainingStep(model.train(), learning_rate=0.0)


def start_pipeline(name: str, sizes: Sizes, device: torch.device) -> Iterator[Pair]:
    """Start one of the two pipelines, over batches in memory."""
    source = pipelines.InMemory(sizes.batch_size, sizes.image_size, pin=True)
    chain = workloads.kornia_chain(sizes.image_size)
    if name == OURS:
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
        **_shares(overlap),
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


def _shares(overlap: Overlap) -> dict[str, Value]:
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


# The suite #


def measure(run: Run, folder: Path) -> None:
    """Record both pipelines and add a case for each.

    Args:
        run: Of the suite; on a device other than CUDA only the loops are run.
        folder: Where traces, figures and pictures are written.
    """
    sizes = _TINY if run.place.is_tiny else Sizes()
    folder.mkdir(parents=True, exist_ok=True)
    run.extra["traces"] = str(folder)
    step = training_step(sizes.image_size, run.place.device)
    for name in (OURS, PLAIN):
        run.attempt(name, partial(_measure_one, run, folder, sizes, step, name))


def _measure_one(run: Run, folder: Path, sizes: Sizes, step: Step, name: str) -> None:
    device = run.place.device
    path = trace_path(folder, name)
    batches = start_pipeline(name, sizes, device)
    rates = record_trace(batches, step, path, device=device, steps=sizes.steps)
    found: Mapping[str, Value] = {}
    if device.type == "cuda":
        overlap = find_overlap(read_trace(path), depth=DEPTH)
        found = _shares(overlap)
        figures = json.dumps(figures_of(overlap), indent=1) + "\n"
        path.with_suffix("").with_suffix(".figures.json").write_text(figures)
    else:
        path.unlink()
        run.omit(f"{name}: overlap", "it needs a CUDA device", is_a_gap=False)
    run.add(_case(name, sizes, rates, found))
    run.save()


def trace_path(folder: Path, name: str) -> Path:
    """Name the file of a pipeline's trace."""
    return folder / f"overlap-{_FILE_NAMES[name]}.json.gz"


def _case(
    name: str, sizes: Sizes, rates: list[float], found: Mapping[str, Value]
) -> Case:
    median, quartiles = spread(rates)
    copy_us, transform_us = found.get("copy_us"), found.get("transform_us")
    gpu_ms = (
        (float(copy_us) + float(transform_us)) / 1e3
        if copy_us is not None and transform_us is not None
        else None
    )
    return Case(
        name=name,
        group="",
        batch_size=sizes.batch_size,
        steps_per_s=median,
        quartiles=quartiles,
        repeats=len(rates),
        samples=tuple(rates),
        gpu_ms=gpu_ms,
        extra=dict(found),
    )


def draw(folder: Path, name: str, path: Path) -> None:
    """Draw the picture of a recorded pipeline."""
    trace = read_trace(trace_path(folder, name))
    save_timeline(trace, find_overlap(trace, depth=DEPTH), path)


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line; see the module's docstring.

    Returns:
        1 if something could not be recorded.
    """
    from benchmarks.__main__ import record_name  # Which knows this one, too.

    parser = argparse.ArgumentParser(
        prog="benchmarks.overlap", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--out-dir", type=Path, required=True, help="made if missing")
    parser.add_argument(
        "--tiny", action="store_true", help="sizes that only show that the code runs"
    )
    parser.add_argument("--device", type=torch.device, help="default: the accelerator")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")  # Kornia's own, and the profiler's.
    device = options.device or (
        torch.accelerator.current_accelerator(check_available=True)
        or torch.device("cpu")
    )
    is_tiny = options.tiny or device.type != "cuda"
    suite = _suite(lambda run: measure(run, options.out_dir))
    machine = describe_machine()
    path = options.out_dir / record_name("overlap", machine)
    place = Place(device, is_tiny)
    record = run_suite(suite, place, machine, lambda so_far: write_record(so_far, path))
    for case in record.cases:
        print(json.dumps({"name": case.name, **case.extra}))
    if device.type == "cuda":
        for name, file in _FILE_NAMES.items():
            draw(options.out_dir, name, options.out_dir / f"timeline-{file}.png")
    return 0 if record.is_complete else 1


def _suite(run: Callable[[Run], None]) -> Suite:
    return Suite("overlap", "", budget_s=60.0, run=run)


if __name__ == "__main__":
    sys.exit(main())
