"""Does the work on the next batches run beside the training step, in a given trace?

Lays the work of the batches over the kernels of the steps, which
:mod:`gpuprefetch.grouping` has told apart, and measures what lies under what.

[Note: Hidden and inside]
A copy is *hidden* for as long as some kernel of the consumer stream runs at the same
time. A batch is *inside* a step if it begins and ends between the begin of that step's
first kernel and the end of its last. The first says what the GPU did at each moment;
the second also holds where a transform's kernel took the place between two kernels of
the step, for then the two did not run at the same time and yet nothing waited in line.
In a plain loop, copies are on the stream of the step itself, so neither can be.
"""

import bisect
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpuprefetch.errors import TraceError
from gpuprefetch.grouping import (
    StepWork,
    find_lead,
    find_streams,
    split_batches,
    split_steps,
)
from gpuprefetch.trace import GpuWork, Trace

__all__ = ["BatchWork", "Gap", "Overlap", "find_overlap"]

# Between two kernels of one stream lie a few microseconds in any case.
_SMALLEST_GAP_US = 10.0
# The clocks of two engines of a GPU agree to about this.
_TOLERANCE_US = 2.0


@dataclass(frozen=True, slots=True)
class BatchWork:
    """What the GPU did to make one batch ready."""

    works: tuple[GpuWork, ...]
    """In the order of their launch; at least one copy or kernel."""
    step_index: int
    """The step that uses it; may be beyond the last one of the trace."""
    hidden_copy_us: float
    """Part of ``copy_us`` under kernels of the steps; see [Note: Hidden and inside]."""
    hidden_transform_us: float
    """The same of ``transform_us``."""
    inside_step: int | None
    """The step in whose kernels it lies; -1: one whose begin is not in the trace."""

    @property
    def copies(self) -> tuple[GpuWork, ...]:
        """Copies from the host: the batch, and what a transform sends along."""
        return tuple(work for work in self.works if work.is_upload)

    @property
    def transforms(self) -> tuple[GpuWork, ...]:
        """All other work."""
        return tuple(work for work in self.works if not work.is_upload)

    @property
    def copy_us(self) -> float:
        """Time of the copies."""
        return sum(work.duration_us for work in self.copies)

    @property
    def transform_us(self) -> float:
        """Time of the transform's kernels; 0 without a transform."""
        return sum(work.duration_us for work in self.transforms)

    @property
    def hidden_us(self) -> float:
        """Time during which it cost the loop no time of its own."""
        return self.hidden_copy_us + self.hidden_transform_us

    @property
    def start_us(self) -> float:
        """When the first copy began."""
        return min(work.start_us for work in self.works)

    @property
    def end_us(self) -> float:
        """When it was ready."""
        return max(work.end_us for work in self.works)

    @property
    def is_inside_earlier_step(self) -> bool:
        """Tell whether it lies in the kernels of a step before the one that uses it."""
        return self.inside_step is not None and self.inside_step < self.step_index


@dataclass(frozen=True, slots=True)
class Gap:
    """A time in which the consumer stream had nothing to run."""

    start_us: float
    duration_us: float


@dataclass(frozen=True, slots=True)
class Overlap:
    """How the batches' work and the steps' kernels lie over each other."""

    side_stream: int | None
    """Where batches are made ready; ``None``: on the consumer stream, as in a plain
    loop."""
    consumer_stream: int
    """Where the steps run."""
    batches: tuple[BatchWork, ...]
    """In the order of their launch."""
    steps: tuple[StepWork, ...]
    """In the order of their launch, without what was launched before the trace."""
    gaps: tuple[Gap, ...]
    """Longer than 10 us, from the first step to the last."""

    @property
    def steady_batches(self) -> tuple[BatchWork, ...]:
        """Those made ready after the first step had begun.

        Before it, the trace shows no kernels that they could be beside.
        """
        if not self.steps:
            return ()
        first = self.steps[0]
        return tuple(
            batch
            for batch in self.batches
            if batch.start_us >= first.start_us and batch.step_index > first.index
        )

    @property
    def copy_hidden_share(self) -> float:
        """Part of the copies' time under kernels of the loop, in [0, 1]; 0 if none.

        This and the other shares are of :attr:`steady_batches`.
        """
        return _share(
            (batch.hidden_copy_us, batch.copy_us) for batch in self.steady_batches
        )

    @property
    def transform_hidden_share(self) -> float:
        """The same for the transforms' kernels."""
        return _share(
            (batch.hidden_transform_us, batch.transform_us)
            for batch in self.steady_batches
        )

    @property
    def hidden_share(self) -> float:
        """The same for both together."""
        return _share(
            (batch.hidden_us, batch.copy_us + batch.transform_us)
            for batch in self.steady_batches
        )

    @property
    def inside_share(self) -> float:
        """Part of the batches that lie inside an earlier step, in [0, 1]; 0 if none."""
        return _share(
            (batch.is_inside_earlier_step, 1) for batch in self.steady_batches
        )

    @property
    def idle_share(self) -> float:
        """Part of the steps' time that is gaps; high: the GPU waits for the host."""
        if not self.steps:
            return 0.0
        whole = self.steps[-1].end_us - self.steps[0].start_us
        return _share([(sum(gap.duration_us for gap in self.gaps), whole)])


def _share(pairs: Iterable[tuple[float, float]]) -> float:
    parts, wholes = 0.0, 0.0
    for part, whole in pairs:
        parts += part
        wholes += whole
    return parts / wholes if wholes else 0.0


def find_overlap(trace: Trace, *, depth: int = 2) -> Overlap:
    """Sort a trace into batches and steps and lay them over each other.

    Args:
        trace: Of one or more training steps.
        depth: Of the loader. Only used to say which step uses which batch where the
            trace does not show the begin of the pass.

    Raises:
        TraceError: It does not say when the host launched the GPU's work.
    """
    works = _works_of_busiest_device(trace)
    side, consumer = find_streams(works, trace)
    groups, step_works = split_batches(works, trace, side, consumer)
    steps = split_steps(step_works, trace, groups)
    lead = 0 if side is None else find_lead(groups, steps, depth)
    busy = _Busy([work for work in step_works if work.kind == "kernel"])
    batches = [
        _lay_over(group, number + lead, busy, steps)
        for number, group in enumerate(groups)
    ]
    own = tuple(step for step in steps if step.index >= 0)
    on_consumer = [work for work in works if work.stream == consumer]
    return Overlap(side, consumer, tuple(batches), own, _find_gaps(own, on_consumer))


def _works_of_busiest_device(trace: Trace) -> list[GpuWork]:
    if all(work.launched_us is None for work in trace.works):
        raise TraceError(
            "the trace does not say when the host launched the GPU's work. Profile "
            "with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]."
        )
    time_us: defaultdict[int, float] = defaultdict(float)
    for work in trace.works:
        time_us[work.device] += work.duration_us
    device = max(time_us, key=lambda key: time_us[key])
    return [work for work in trace.works if work.device == device]


# Laying over #


class _Busy:
    """The times in which at least one of some works runs."""

    def __init__(self, works: Sequence[GpuWork]) -> None:
        self.starts: list[float] = []
        self.ends: list[float] = []
        for work in works:  # By start.
            if self.ends and work.start_us <= self.ends[-1]:
                self.ends[-1] = max(self.ends[-1], work.end_us)
            else:
                self.starts.append(work.start_us)
                self.ends.append(work.end_us)

    def overlap_us(self, work: GpuWork) -> float:
        """Time of ``work`` during which something runs here, too."""
        shared = 0.0
        place = bisect.bisect_right(self.ends, work.start_us)
        while place < len(self.starts) and self.starts[place] < work.end_us:
            begin = max(self.starts[place], work.start_us)
            shared += min(self.ends[place], work.end_us) - begin
            place += 1
        return shared


def _lay_over(
    group: Sequence[GpuWork], step_index: int, busy: _Busy, steps: Sequence[StepWork]
) -> BatchWork:
    copies = [work for work in group if work.is_upload]
    transforms = [work for work in group if not work.is_upload]
    return BatchWork(
        works=tuple(group),
        step_index=step_index,
        hidden_copy_us=sum(map(busy.overlap_us, copies)),
        hidden_transform_us=sum(map(busy.overlap_us, transforms)),
        inside_step=_find_step_around(group, steps),
    )


def _find_step_around(
    group: Sequence[GpuWork], steps: Sequence[StepWork]
) -> int | None:
    begin = min(work.start_us for work in group) + _TOLERANCE_US
    end = max(work.end_us for work in group) - _TOLERANCE_US
    for step in steps:
        if step.start_us <= begin and end <= step.end_us:
            return step.index
    return None


def _find_gaps(steps: Sequence[StepWork], works: Sequence[GpuWork]) -> tuple[Gap, ...]:
    if not steps:
        return ()
    begin, end = steps[0].start_us, steps[-1].end_us
    busy = _Busy([w for w in works if w.end_us >= begin and w.start_us <= end])
    between = zip(busy.ends[:-1], busy.starts[1:], strict=True)
    gaps = (Gap(stopped, resumed - stopped) for stopped, resumed in between)
    return tuple(gap for gap in gaps if gap.duration_us >= _SMALLEST_GAP_US)
