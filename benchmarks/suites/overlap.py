"""How much of the copies and of the augmentation is hidden under the training step?

Read from a profiler's trace of 20 steps, and from one of the plain loop for contrast;
:mod:`benchmarks.overlap` records them. The traces stay in ``bench-out``, and the
picture is drawn from there.
"""

from collections.abc import Callable
from pathlib import Path

from benchmarks.markdown import table
from benchmarks.overlap import OURS, PLAIN, draw, measure, trace_path
from benchmarks.record import Case, Record, Value
from benchmarks.suite import Suite

__all__ = ["SUITE"]

_TRACES = Path("bench-out")
_PICTURES = {OURS: "timeline.png", PLAIN: "timeline-plain.png"}


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
    cases = [case for case in record.cases if case.name in (OURS, PLAIN)]
    rows = [[label, *_cells(cases, key, show)] for label, key, show in _ROWS]
    return {"overlap": table(["", *(case.name for case in cases)], rows)}


def _cells(cases: list[Case], key: str, show: Callable[[Value], str]) -> list[str]:
    return [show(case.extra.get(key)) for case in cases]


def _plots(record: Record, folder: Path) -> None:
    traces = Path(str(record.extra.get("traces", _TRACES)))
    for name, picture in _PICTURES.items():
        if trace_path(traces, name).exists():
            draw(traces, name, folder / picture)
        else:
            print(f"{picture}: left as it is; its trace is not in {traces}")


SUITE = Suite(
    name="overlap",
    title="what runs beside the training step, seen by a profiler",
    budget_s=60.0,
    run=lambda run: measure(run, _TRACES),
    tables=_tables,
    plots=_plots,
)
