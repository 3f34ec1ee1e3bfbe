"""How is a trace drawn, so that one sees what runs beside what?

A row for each thread and stream, time from left to right, and a colour for each batch:
its copy, its augmentation and the step that uses it look alike. Drawn for people who
have never seen a profiler, so only what answers the question is there.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gpuprefetch import ranges
from gpuprefetch.errors import SettingError, TraceError
from gpuprefetch.grouping import StepWork
from gpuprefetch.overlap import BatchWork, Overlap
from gpuprefetch.plot import COLOURS, import_figure, save_figure
from gpuprefetch.trace import GpuWork, Trace

__all__ = ["save_timeline"]

Look = Literal["copy", "transform", "step", "span", "pack"]

_STYLES: dict[Look, dict[str, Any]] = {
    "copy": {"hatch": "////", "alpha": 0.55},
    "transform": {"alpha": 1.0},
    "step": {"alpha": 0.4},
    "span": {"alpha": 0.12},  # Behind the kernels of a step, from first to last.
    "pack": {"hatch": "....", "alpha": 0.25},
}
_MEANINGS: dict[Look, str] = {
    "copy": "copy to the GPU",
    "transform": "augmentation",
    "step": "training step",
    "pack": "packing into pinned memory",
}
_GREY = "#606060"

_DOTS_PER_INCH = 130
_WIDTH_INCHES = 11.0
_ROW_INCHES = 0.62
_FRAME_INCHES = 1.5  # Heading, legend and axis.
_BAR = 0.62  # Of a row's height.

# What torch calls each operation of a backward pass, whichever thread runs it.
_BACKWARD = "autograd::engine::"
# Launches further apart than this are drawn as two bars: the thread did other things.
_APART_US = 300.0
# A picture shows no more than this many parts side by side.
_FINEST_PARTS = 400
# Of the text in bars, if it filled a row.
_LETTERS_ACROSS = 130
# From here on the heading says that it works.
_MOSTLY = 0.5
# Below this part of the picture's width a batch needs a closer look.
_SMALL_PART = 0.1
_CLOSER_MARGIN = 1.0  # Of a batch's length, on both sides.


@dataclass(frozen=True, slots=True)
class _Bar:
    start_us: float
    end_us: float
    batch: int | None
    """``None``: the trace does not say which."""
    look: Look
    text: str = ""
    has_room: bool = False
    """The text may stand to the right of it."""


@dataclass(frozen=True, slots=True)
class _Row:
    label: str
    bars: tuple[_Bar, ...]


def save_timeline(
    trace: Trace,
    overlap: Overlap,
    path: Path,
    *,
    num_steps: int = 4,
    first_step: int | None = None,
) -> None:
    """Draw a few steps of a trace to one picture file.

    Args:
        trace: What was recorded.
        overlap: What was found in it.
        path: Its suffix names the format (``.png``). Replaced if it exists.
        num_steps: Steps to show, at least 1; as many as there are if that is less.
        first_step: Counted from 0; by default those in the middle of the trace.

    Raises:
        DependencyError: matplotlib is not installed.
        SettingError: The trace has no such step, or the format is not known.
        TraceError: The trace has no steps.
        OSError: The file cannot be written.
    """
    figure_class = import_figure()
    shown = _choose_steps(overlap.steps, num_steps, first_step)
    begin, end = shown[0].start_us, shown[-1].end_us
    apart_us = (end - begin) / _FINEST_PARTS
    rows = [*_host_rows(trace, overlap), *_gpu_rows(overlap, apart_us=apart_us)]
    closer = _choose_batch(overlap, begin, end)
    num_streams = 1 if overlap.side_stream is None else 2
    heights = [len(rows)] + ([num_streams + 0.6] if closer else [])
    inches = sum(heights) * _ROW_INCHES + _FRAME_INCHES
    figure = figure_class(figsize=(_WIDTH_INCHES, inches), layout="constrained")
    panels = figure.subplots(len(heights), height_ratios=heights, squeeze=False)
    margin = 0.01 * (end - begin)
    _draw_rows(panels[0][0], rows, begin - margin, end + margin, origin=begin)
    if closer:
        _draw_closer(panels[0][0], panels[1][0], overlap, closer, begin)
    _draw_heading(figure, panels[0][0], overlap, rows)
    save_figure(figure, path, dots_per_inch=_DOTS_PER_INCH)


def _choose_steps(
    steps: Sequence[StepWork], num_steps: int, first: int | None
) -> Sequence[StepWork]:
    if not steps:
        raise TraceError(
            "the trace has no training steps. Let the profiler record at least one "
            "step of the loop after it has started."
        )
    if first is None:
        first = max(len(steps) - num_steps, 0) // 2
    if first >= len(steps):
        raise SettingError(
            f"the trace has {len(steps)} steps, counted from 0; there is no step "
            f"{first}."
        )
    return steps[first : first + num_steps]


def _choose_batch(overlap: Overlap, begin: float, end: float) -> BatchWork | None:
    """Choose the batch for a closer look, if batches are small in the picture."""
    inside = [b for b in overlap.batches if begin <= b.start_us and b.end_us <= end]
    if not inside:
        return None
    middle = (begin + end) / 2

    def merit(batch: BatchWork) -> tuple[bool, float]:
        return batch.is_inside_earlier_step, -abs(batch.start_us - middle)

    best = max(inside, key=merit)
    is_small = best.end_us - best.start_us < _SMALL_PART * (end - begin)
    return best if is_small else None


# What is drawn #


def _gpu_rows(overlap: Overlap, *, apart_us: float) -> list[_Row]:
    """Make a row for each stream.

    Args:
        overlap: What was found in the trace.
        apart_us: Kernels of a step that are closer than this are drawn as one; 0: a
            closer look, at single ones.
    """
    is_close = apart_us == 0
    on_consumer = [
        bar for step in overlap.steps for bar in _step_bars(step, apart_us=apart_us)
    ]
    has_room = overlap.side_stream is not None
    of_batches = [
        bar
        for batch in overlap.batches
        for bar in _batch_bars(batch, is_close=is_close, has_room=has_room)
    ]
    if overlap.side_stream is None:
        return [_Row("GPU: your stream", (*on_consumer, *of_batches))]
    return [
        _Row("GPU: side stream", tuple(of_batches)),
        _Row("GPU: your stream", tuple(on_consumer)),
    ]


def _batch_bars(batch: BatchWork, *, is_close: bool, has_room: bool) -> Iterator[_Bar]:
    last = max(batch.works, key=lambda work: work.end_us)
    for work in batch.works:
        look: Look = "copy" if work.is_upload else "transform"
        text = f"batch {batch.step_index}" if work is last and has_room else ""
        if is_close:
            is_wide = work.duration_us > (batch.end_us - batch.start_us) / 6
            text = _MEANINGS[look] if is_wide else ""
        yield _Bar(work.start_us, work.end_us, batch.step_index, look, text, has_room)


def _step_bars(step: StepWork, *, apart_us: float) -> Iterator[_Bar]:
    if not apart_us:
        for work in step.works:
            yield _Bar(work.start_us, work.end_us, step.index, "step", "kernel")
        return
    spans = _join(((w.start_us, w.end_us) for w in step.works), apart_us)
    yield from (_Bar(begin, end, step.index, "step") for begin, end in spans)
    text = f"step on batch {step.index}"
    yield _Bar(step.start_us, step.end_us, step.index, "span", text)


def _join(
    spans: Iterable[tuple[float, float]], apart_us: float
) -> list[tuple[float, float]]:
    """Join spans, by start, between which lies less than ``apart_us``."""
    joined: list[tuple[float, float]] = []
    for begin, end in spans:
        if joined and begin - joined[-1][1] < apart_us:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined


def _host_rows(trace: Trace, overlap: Overlap) -> Iterator[_Row]:
    """Show when each thread of the host asks for what."""
    loop: dict[int, list[_Bar]] = {}
    for step in overlap.steps:
        for thread, bars in _launch_bars(step.works, step.index, "step"):
            loop.setdefault(thread, []).extend(bars)
    for batch in overlap.batches:
        for thread, bars in _launch_bars(batch.works, batch.step_index, "copy"):
            loop.setdefault(thread, []).extend(bars)
    issuers = {work.launch_thread for batch in overlap.batches for work in batch.works}
    for thread in sorted(loop, key=lambda thread: thread not in issuers):
        label = _thread_label(thread, trace, is_issuer=thread in issuers)
        yield _Row(label, tuple(loop[thread]))
    # In the feeder's thread, where that is recorded.
    packing = [
        _Bar(one.start_us, one.end_us, None, "pack")
        for one in trace.ranges_named(ranges.PIN)
        if one.thread not in issuers
    ]
    if packing:
        yield _Row("CPU: feeder", tuple(packing))


def _thread_label(thread: int, trace: Trace, *, is_issuer: bool) -> str:
    if is_issuer:
        return "CPU: your loop"
    # Its name tells less: some systems give all threads that of the program.
    is_backward = any(
        one.thread == thread and one.name.startswith(_BACKWARD) for one in trace.ranges
    )
    name = trace.thread_names.get(thread, "")
    if is_backward or "autograd" in name:
        return "CPU: backward pass"
    is_main = "main" in name or "python" in name
    return "CPU: your loop" if is_main else f"CPU: thread {thread}"


def _launch_bars(
    works: Iterable[GpuWork], batch: int, look: Look
) -> Iterator[tuple[int, list[_Bar]]]:
    """Join the launches of each thread to bars."""
    times: dict[int, list[float]] = {}
    for work in works:
        if work.launched_us is not None and work.launch_thread is not None:
            times.setdefault(work.launch_thread, []).append(work.launched_us)
    for thread, launches in times.items():
        spans = _join(((when, when) for when in sorted(launches)), _APART_US)
        yield thread, [_Bar(begin, end, batch, look) for begin, end in spans]


# Drawing #


def _draw_rows(
    panel: Any, rows: Sequence[_Row], begin: float, end: float, *, origin: float
) -> None:
    """Draw rows between two times; the axis counts milliseconds from ``origin``."""
    for place, row in enumerate(rows):
        for bar in row.bars:
            if bar.end_us >= begin and bar.start_us <= end:
                _draw_bar(panel, place, bar, (begin, end), origin)
    panel.set_yticks(range(len(rows)), [row.label for row in rows])
    panel.set_ylim(len(rows) - 0.5, -0.5)
    panel.set_xlim((begin - origin) / 1e3, (end - origin) / 1e3)
    panel.tick_params(axis="y", length=0)
    panel.spines[["top", "right", "left"]].set_visible(False)
    for place in range(1, len(rows)):
        panel.axhline(place - 0.5, color="0.88", linewidth=0.8, zorder=0)
    panel.set_xlabel("milliseconds")


def _draw_bar(
    panel: Any, place: int, bar: _Bar, window: tuple[float, float], origin: float
) -> None:
    colour = _GREY if bar.batch is None else COLOURS[bar.batch % len(COLOURS)]
    start, width = (bar.start_us - origin) / 1e3, (bar.end_us - bar.start_us) / 1e3
    panel.barh(
        place,
        width,
        left=start,
        height=_BAR,
        color=colour,
        edgecolor=colour,
        linewidth=0.6,
        **_STYLES[bar.look],
    )
    if bar.text:
        _write_text(panel, place, bar, window, origin)


def _write_text(
    panel: Any, place: int, bar: _Bar, window: tuple[float, float], origin: float
) -> None:
    """Write into the part of a bar that is seen, or beside it if it is too short."""
    left, right = max(bar.start_us, window[0]), min(bar.end_us, window[1])
    letter_us = (window[1] - window[0]) / _LETTERS_ACROSS
    if right - left > letter_us * len(bar.text):
        where, side = (left + right) / 2, "center"
    elif bar.has_room and right + letter_us * len(bar.text) < window[1]:
        where, side = right + letter_us / 2, "left"
    else:
        return
    panel.text(
        (where - origin) / 1e3, place, bar.text, ha=side, va="center", fontsize=9
    )


def _draw_closer(
    overview: Any, panel: Any, overlap: Overlap, batch: BatchWork, origin: float
) -> None:
    """Draw the surroundings of one batch, and mark in the overview where that is."""
    margin = _CLOSER_MARGIN * (batch.end_us - batch.start_us)
    begin, end = batch.start_us - margin, batch.end_us + margin
    _draw_rows(panel, _gpu_rows(overlap, apart_us=0), begin, end, origin=origin)
    edges = [(when - origin) / 1e3 for when in (begin, end)]
    overview.axvspan(*edges, color="0.75", alpha=0.5, zorder=0, linewidth=0)
    panel.set_facecolor("0.96")
    title = f"A closer look at the grey part: batch {batch.step_index} is made ready"
    if batch.is_inside_earlier_step:
        title += f" while the GPU trains on batch {batch.inside_step}"
    panel.set_title(title, fontsize=10, loc="left")


def _draw_heading(
    figure: Any, panel: Any, overlap: Overlap, rows: Sequence[_Row]
) -> None:
    share = overlap.hidden_share
    if not overlap.batches:
        heading = "No batch is copied to the GPU in this trace"
    elif share >= _MOSTLY:
        heading = (
            "The next batches are copied and augmented while the GPU trains "
            f"({share:.0%} of that time is hidden)"
        )
    elif share > 0:
        heading = f"{share:.0%} of the time for copy and augmentation is hidden"
    else:
        heading = "Copy, augmentation and training take turns: nothing is hidden"
    figure.suptitle(heading, fontsize=12)
    looks = {bar.look for row in rows for bar in row.bars}
    handles = [
        panel.barh(-9, 0, color=_GREY, edgecolor=_GREY, label=text, **_STYLES[look])
        for look, text in _MEANINGS.items()
        if look in looks
    ]
    figure.legend(
        handles=handles,
        title="one colour is one batch",
        loc="outside lower center",
        ncols=len(handles),
        frameon=False,
        fontsize=9,
        title_fontsize=9,
    )
