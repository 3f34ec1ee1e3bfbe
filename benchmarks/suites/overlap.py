"""How much of the copies and of the augmentation is hidden under the training step?

Read from a profiler's trace of 20 steps, and from one of the plain loop for contrast. A
profiler slows the host, so the speeds here are no speeds of training. The traces stay
in ``bench-out``, and the pictures are drawn from there.
"""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from benchmarks.loops import Step
from benchmarks.markdown import table
from benchmarks.profiled import (
    DEPTH,
    TINY,
    Pipeline,
    Sizes,
    figures_of,
    record_trace,
    shares_of,
    start_pipeline,
)
from benchmarks.record import Case, Record, Value, spread
from benchmarks.suite import Run, Suite
from benchmarks.suites.shared import CHAINED, ClassificationStep
from gpuprefetch.overlap import find_overlap
from gpuprefetch.timeline import save_timeline
from gpuprefetch.trace import read_trace

__all__ = ["NAMES", "SUITE", "draw", "measure", "trace_path"]

NAMES: dict[Pipeline, str] = {
    "ours": CHAINED,
    "plain": "plain loop, fused (chained)",
}

_TRACES = Path("bench-out")
_PICTURES: dict[Pipeline, str] = {
    "ours": "overlap.png",
    "plain": "overlap-plain.png",
}


# Measured #


def measure(run: Run, folder: Path) -> None:
    """Record both pipelines and add a case for each.

    Args:
        run: Of the suite; on a device other than CUDA only the loops are run.
        folder: Where traces, figures and pictures are written.
    """
    sizes = TINY if run.place.is_tiny else Sizes()
    folder.mkdir(parents=True, exist_ok=True)
    run.extra["traces"] = str(folder)
    step = ClassificationStep(sizes.image_size, run.place.device)
    for pipeline, name in NAMES.items():
        run.attempt(name, partial(_measure_one, run, folder, sizes, step, pipeline))


def _measure_one(
    run: Run, folder: Path, sizes: Sizes, step: Step, pipeline: Pipeline
) -> None:
    device, name = run.place.device, NAMES[pipeline]
    path = trace_path(folder, pipeline)
    batches = start_pipeline(pipeline, sizes, device)
    rates = record_trace(batches, step, path, device=device, steps=sizes.steps)
    found: Mapping[str, Value] = {}
    if device.type == "cuda":
        overlap = find_overlap(read_trace(path), depth=DEPTH)
        found = shares_of(overlap)
        figures = json.dumps(figures_of(overlap), indent=1) + "\n"
        path.with_suffix("").with_suffix(".figures.json").write_text(figures)
    else:
        path.unlink()
        run.omit(f"{name}: overlap", "it needs a CUDA device", is_a_gap=False)
    run.add(_case(name, sizes, rates, found))
    run.save()


def trace_path(folder: Path, pipeline: Pipeline) -> Path:
    """Name the file of a pipeline's trace."""
    return folder / f"overlap-{pipeline}.json.gz"


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


def draw(folder: Path, pipeline: Pipeline, path: Path) -> None:
    """Draw the picture of a recorded pipeline."""
    trace = read_trace(trace_path(folder, pipeline))
    save_timeline(trace, find_overlap(trace, depth=DEPTH), path)


# Shown #


def _micros(value: Value) -> str:
    return "" if value is None else f"{float(value):.0f} us"


def _percent(value: Value) -> str:
    return "" if value is None else f"{float(value):.1%}"


_ROWS: tuple[tuple[str, str, Callable[[Value], str]], ...] = (
    ("copies, per batch", "copy_us", _micros),
    ("of it while kernels of the step ran", "copy_hidden_share", _percent),
    ("augmentation, per batch", "transform_us", _micros),
    ("of it while kernels of the step ran", "transform_hidden_share", _percent),
    ("batches made ready within an earlier step", "inside_share", _percent),
    ("the training stream stood by", "idle_share", _percent),
)


def _tables(record: Record) -> dict[str, str]:
    cases = list(record.cases)
    rows = [[label, *_cells(cases, key, show)] for label, key, show in _ROWS]
    return {"overlap": table(["", *(case.name for case in cases)], rows)}


def _cells(cases: list[Case], key: str, show: Callable[[Value], str]) -> list[str]:
    return [show(case.extra.get(key)) for case in cases]


def _plots(record: Record, folder: Path) -> None:
    traces = Path(str(record.extra.get("traces", _TRACES)))
    for pipeline, picture in _PICTURES.items():
        if trace_path(traces, pipeline).exists():
            draw(traces, pipeline, folder / picture)
        else:
            print(f"{picture}: left as it is; its trace is not in {traces}")


SUITE = Suite(
    name="overlap",
    title="what runs beside the training step, seen by a profiler",
    budget_s=30.0,
    run=lambda run: measure(run, _TRACES),
    tables=_tables,
    plots=_plots,
)
