"""Which work in a trace belongs to which batch, and which to which training step?

Finds the *side stream*, on which batches are copied and transformed, and the *consumer
stream*, on which the loop's own kernels run; sorts the work of the one into batches and
that of the other into steps. The loader's named ranges are used where the trace has
them. Without them it goes by the order in which the host launched the work, so traces
of other loaders and of plain loops can be read, too.
"""

import bisect
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpuprefetch.ranges import COPY, HAND_OFF, TRANSFORM
from gpuprefetch.trace import GpuWork, HostRange, Trace

__all__ = ["StepWork", "find_lead", "find_streams", "split_batches", "split_steps"]

_STEP_RANGE = "ProfilerStep#"  # What `profiler.step()` leaves in the trace.

_FUSED_KERNEL = "augment"  # The name of the package's own kernel.
_COLLECTIVE = "nccl"  # Kernels of these have streams of their own.

# The clocks of two engines of a GPU agree to about this.
_TOLERANCE_US = 2.0
# No loader is further ahead; beyond it the pairing of batches and steps is a guess.
_MOST_STEPS_AHEAD = 16


@dataclass(frozen=True, slots=True)
class StepWork:
    """What the GPU did for one training step."""

    index: int
    """Counted from 0 in the trace; -1 holds what was launched before the first."""
    works: tuple[GpuWork, ...]
    """On the consumer stream, by start; at least one."""

    @property
    def start_us(self) -> float:
        """When its first kernel began."""
        return self.works[0].start_us

    @property
    def end_us(self) -> float:
        """When its last kernel was over."""
        return max(work.end_us for work in self.works)


# Streams #


def find_streams(works: Sequence[GpuWork], trace: Trace) -> tuple[int | None, int]:
    """Find the side stream and the consumer stream of one device.

    Returns:
        The two; no side stream if batches are made ready on the consumer's own.
    """
    ranged = _works_within(works, _loader_ranges(trace))
    uploads = [work for work in works if work.is_upload]
    candidate = _busiest_stream(ranged or uploads)
    kernels = [
        work
        for work in works
        if work.kind == "kernel" and not work.name.startswith(_COLLECTIVE)
    ]
    if ranged:  # Then the loader itself says that the rest is the loop's.
        kernels = [work for work in kernels if work.stream != candidate] or kernels
    # A loop's backward pass has a thread of its own, which no loader uses.
    uploaders = {work.launch_thread for work in uploads} | {None}
    backward = [work for work in kernels if work.launch_thread not in uploaders]
    consumer = _busiest_stream(backward or kernels or works)
    assert consumer is not None, "a device without work was chosen"
    return (None if candidate == consumer else candidate), consumer


def _loader_ranges(trace: Trace) -> list[HostRange]:
    return trace.ranges_named(COPY) + trace.ranges_named(TRANSFORM)


def _works_within(
    works: Iterable[GpuWork], ranges: Iterable[HostRange]
) -> list[GpuWork]:
    """Find what was launched inside one of some ranges, by the range's own thread."""
    by_thread: dict[int, list[HostRange]] = {}
    for one in sorted(ranges, key=lambda one: one.start_us):
        by_thread.setdefault(one.thread, []).append(one)
    starts = {
        thread: [one.start_us for one in ranges] for thread, ranges in by_thread.items()
    }

    def is_within(work: GpuWork) -> bool:
        if work.launched_us is None or work.launch_thread not in by_thread:
            return False
        thread = work.launch_thread
        place = bisect.bisect_right(starts[thread], work.launched_us) - 1
        return place >= 0 and work.launched_us <= by_thread[thread][place].end_us

    return [work for work in works if is_within(work)]


def _busiest_stream(works: Iterable[GpuWork]) -> int | None:
    time_us: defaultdict[int, float] = defaultdict(float)
    for work in works:
        # What took no measurable time counts, too.
        time_us[work.stream] += work.duration_us or 1e-3
    return max(time_us, key=lambda stream: time_us[stream]) if time_us else None


# Batches #


def split_batches(
    works: Sequence[GpuWork], trace: Trace, side: int | None, consumer: int
) -> tuple[list[list[GpuWork]], list[GpuWork]]:
    """Tell the batches' work from the steps', and one batch from the next.

    Args:
        works: Of one device, by start.
        trace: Where they are from.
        side: What :func:`find_streams` found.
        consumer: The same.

    Returns:
        The works of each batch, in the order of their launch, without those launched
        before the trace; and the works of all steps, by start.
    """
    on_consumer = [work for work in works if work.stream == consumer]
    if side is None:
        within = set(map(id, _works_within(on_consumer, _loader_ranges(trace))))
        of_batches = [
            work
            for work in on_consumer
            if work.is_upload or work.name == _FUSED_KERNEL or id(work) in within
        ]
    else:
        of_batches = [work for work in works if work.stream == side]
    taken = set(map(id, of_batches))
    of_steps = [work for work in on_consumer if id(work) not in taken]
    launched = sorted(
        (work for work in of_batches if work.launched_us is not None),
        key=lambda work: work.order_us,
    )
    if marks := [one.start_us for one in trace.ranges_named(COPY)]:
        groups = _split_at(launched, sorted(marks))
        return [group for group in groups[1:] if group], of_steps
    groups = _split_between_launches(launched, of_steps)
    if side is None:
        groups = _merge_small(groups)
    return _split_repeats(groups), of_steps


def _split_at(works: Sequence[GpuWork], marks: Sequence[float]) -> list[list[GpuWork]]:
    """Cut works, in the order of their launch, at times of the host.

    Returns:
        One list more than there are marks; lists may be empty.
    """
    groups: list[list[GpuWork]] = [[] for _ in range(len(marks) + 1)]
    for work in works:
        groups[bisect.bisect_right(marks, work.order_us)].append(work)
    return groups


def _split_between_launches(
    launched: Sequence[GpuWork], of_steps: Iterable[GpuWork]
) -> list[list[GpuWork]]:
    """Cut where the same thread launched a kernel of the step in between.

    A loader issues a batch in one go, so what was launched without such a kernel in
    between belongs together.
    """
    threads = {work.launch_thread for work in launched}
    foreign = sorted(w.order_us for w in of_steps if w.launch_thread in threads)
    groups: list[list[GpuWork]] = []
    last_place = -1
    for work in launched:
        place = bisect.bisect_right(foreign, work.order_us)
        if place != last_place:
            groups.append([])
        groups[-1].append(work)
        last_place = place
    return groups


def _merge_small(groups: Sequence[list[GpuWork]]) -> list[list[GpuWork]]:
    """Join small uploads in the middle of a step to the batch before them."""
    largest = max((_largest_upload(group) for group in groups), default=0.0)
    merged: list[list[GpuWork]] = []
    for group in groups:
        if merged and _largest_upload(group) < largest / 2:
            merged[-1] += group
        else:
            merged.append(list(group))
    return merged


def _largest_upload(group: Iterable[GpuWork]) -> float:
    sizes = (work.num_bytes or work.duration_us for work in group if work.is_upload)
    return max(sizes, default=0.0)


def _split_repeats(groups: Sequence[list[GpuWork]]) -> list[list[GpuWork]]:
    """Cut groups that hold several batches, as the first of a pass does."""
    names = [tuple(work.name for work in group) for group in groups]
    if not names:
        return []
    ((usual, _),) = Counter(names).most_common(1)
    size = len(usual)
    split: list[list[GpuWork]] = []
    for group, name in zip(groups, names, strict=True):
        is_repeat = len(name) > size and name == usual * (len(name) // size)
        step = size if is_repeat else len(group)
        split += [group[at : at + step] for at in range(0, len(group), step)]
    return split


# Steps #


def split_steps(
    of_steps: Sequence[GpuWork], trace: Trace, groups: Sequence[Sequence[GpuWork]]
) -> list[StepWork]:
    """Sort the loop's work into steps, by the time of its launch.

    A step begins with the hand-off of its batch, where the trace names it; else where
    the next batch is issued; else where ``profiler.step()`` was called.
    """
    parts = _split_at(of_steps, _step_marks(trace, groups))
    numbered = enumerate([part for part in parts[1:] if part])
    before = [StepWork(-1, tuple(parts[0]))] if parts[0] else []
    return [*before, *(StepWork(number, tuple(part)) for number, part in numbered)]


def _step_marks(trace: Trace, groups: Sequence[Sequence[GpuWork]]) -> list[float]:
    handed = [one.start_us for one in trace.ranges_named(HAND_OFF)]
    issued = [group[0].order_us for group in groups]
    stepped = [one.start_us for one in trace.ranges if one.name.startswith(_STEP_RANGE)]
    return sorted(handed or issued or stepped) or [-1.0]


def find_lead(
    groups: Sequence[Sequence[GpuWork]], steps: Sequence[StepWork], depth: int
) -> int:
    """Find by how many steps the first batch of the trace is ahead of its first step.

    After ``next``, ``depth`` batches are in flight. Where the trace shows fewer of them
    being issued before the first step, the others came before the trace, and they are
    used first.
    """
    own = [step for step in steps if step.index >= 0]
    seen = max((_count_issued(groups, step) - step.index for step in own), default=0)
    first = max(depth - seen, 0)
    for lead in range(first, _MOST_STEPS_AHEAD):
        if _is_ready_in_time(groups, own, lead):
            return lead
    return first


def _count_issued(groups: Sequence[Sequence[GpuWork]], step: StepWork) -> int:
    """Count the batches issued before the step's first launch."""
    first_launch = min(work.order_us for work in step.works)
    return sum(group[0].order_us < first_launch for group in groups)


def _is_ready_in_time(
    groups: Sequence[Sequence[GpuWork]], steps: Sequence[StepWork], lead: int
) -> bool:
    """Tell whether no batch is still being made when the step that uses it begins."""
    return all(
        max(work.end_us for work in group) <= step.start_us + _TOLERANCE_US
        for group, step in zip(groups, steps[lead:], strict=False)
    )
