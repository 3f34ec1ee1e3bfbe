"""Is a profiler's trace read as it was written, and its overlap found, or found absent?

The traces come from ``synthetic_trace``, where one knows what happened. That those of a
real GPU are read, too, is for ``gpu/test_overlap.py`` to show.
"""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from gpuprefetch.errors import TraceError
from gpuprefetch.overlap import Overlap, find_overlap
from gpuprefetch.trace import Trace, read_trace
from tests.synthetic_trace import (
    AUTOGRAD,
    CONSUMER,
    FEEDER,
    LOOP,
    SIDE,
    Loop,
    write_trace,
)


def trace_of(loop: Loop, folder: Path, name: str = "trace.json") -> Trace:
    return read_trace(write_trace(folder / name, loop.build()))


def overlap_of(loop: Loop, folder: Path) -> Overlap:
    return find_overlap(trace_of(loop, folder), depth=loop.depth)


# Reading #


@pytest.mark.parametrize("name", ["t.json", "t.json.gz", "t.pt.trace.json"])
def test_records_hold_what_the_file_says(tmp_path: Path, name: str) -> None:
    trace = trace_of(Loop(num_steps=1, num_kernels=4, is_fresh=True), tmp_path, name)
    assert trace.thread_names == {
        LOOP: f"thread {LOOP} (python)",
        AUTOGRAD: f"thread {AUTOGRAD} (pt_autograd_0)",
    }
    on_side = [work for work in trace.works if work.stream == SIDE]
    assert [work.kind for work in on_side[:4]] == ["copy", "copy", "copy", "kernel"]
    copy, kernel = on_side[0], on_side[3]
    assert copy.is_upload
    assert not kernel.is_upload
    assert (copy.device, copy.num_bytes) == (0, 118 * 53_000)
    assert copy.duration_us == 118.0
    assert copy.end_us == copy.start_us + 118.0
    assert kernel.name == "augment"
    threads = {w.launch_thread for w in trace.works if w.stream == CONSUMER}
    assert threads == {LOOP, AUTOGRAD}
    assert all(
        work.launched_us is not None and work.launched_us < work.start_us
        for work in trace.works
    )
    (first, _) = trace.ranges_named("gpuprefetch::copy")
    assert (first.kind, first.thread) == ("range", LOOP)
    assert first.start_us < copy.launched_us < first.end_us
    assert {one.thread for one in trace.ranges_named("gpuprefetch::pin")} == {FEEDER}
    starts = [work.start_us for work in trace.works]
    assert starts == sorted(starts)


def test_times_count_from_the_first_event(tmp_path: Path) -> None:
    """Torch counts from the machine's start: microseconds with 13 digits."""
    late = trace_of(Loop(num_steps=2), tmp_path)
    early = trace_of(Loop(num_steps=2, first_ts=0.0), tmp_path)
    for one, other in zip(late.works, early.works, strict=True):
        assert one.start_us == pytest.approx(other.start_us, abs=0.01)
    assert min(one.start_us for one in early.ranges) == 0.0


def test_events_without_arguments_are_read_by_their_row(tmp_path: Path) -> None:
    event = {"ph": "X", "cat": "kernel", "name": "k", "pid": 1, "tid": 9, "ts": "3"}
    path = write_trace(tmp_path / "t.json", {"traceEvents": [event, "noise", 3]})
    (work,) = read_trace(path).works
    assert (work.device, work.stream, work.start_us) == (1, 9, 0.0)
    assert work.launched_us is None


def test_a_bare_list_of_events_is_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps(Loop(num_steps=1).build()["traceEvents"]))
    assert read_trace(path).works


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a trace of torch.profiler: it is not JSON"),
        (b"import torch", "it is not JSON"),
        (b'{"a": 1}', "it has no list of traceEvents"),
        (b'"text"', "it has no list of traceEvents"),
        (b'{"traceEvents": []}', "holds no work of a GPU"),
        (b'{"traceEvents": [{"ph": "X", "cat": "kernel"}]}', "KeyError"),
        (
            b'{"traceEvents": [{"ph": "X", "cat": "kernel", "ts": "now", "pid": 0}]}',
            "does not write: ValueError",
        ),
        (
            gzip.compress(b'{"traceEvents": []}' * 99, mtime=0)[:40],
            "is cut off or damaged",
        ),
        (b"\x1f\x8bnothing of that kind", "is cut off or damaged"),
    ],
)
def test_what_is_no_trace_is_refused_by_name(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "some.json.gz"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=message) as raised:
        read_trace(path)
    assert str(path) in str(raised.value)
    assert isinstance(raised.value, ValueError)


def test_a_trace_of_the_cpu_alone_is_refused(tmp_path: Path) -> None:
    """By torch itself, so that the file is a real one."""
    path = tmp_path / "cpu.json"
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        torch.ones(3).sum()
    recorded.export_chrome_trace(str(path))
    with pytest.raises(TraceError, match=r"no work of a GPU.*ProfilerActivity\.CUDA"):
        read_trace(path)


def test_a_trace_without_launches_is_refused(tmp_path: Path) -> None:
    built = Loop(num_steps=1).build()
    built["traceEvents"] = [
        event for event in built["traceEvents"] if event.get("cat") != "cuda_runtime"
    ]
    trace = read_trace(write_trace(tmp_path / "t.json", built))
    with pytest.raises(TraceError, match="when the host launched"):
        find_overlap(trace)


# Overlap #

_OURS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "no ranges": {"has_ranges": False},
    "begin of the pass": {"is_fresh": True},
    "begin of the pass, no ranges": {"is_fresh": True, "has_ranges": False},
    "depth 3": {"depth": 3},
    "depth 3, begin of the pass, no ranges": {
        "depth": 3,
        "is_fresh": True,
        "has_ranges": False,
    },
    "copies of one size": {"copies_us": (60.0, 60.0), "has_ranges": False},
    "several kernels": {"transform_us": (20.0, 20.0, 20.0), "has_ranges": False},
    "no transform": {"transform_us": (), "has_ranges": False},
}


@pytest.mark.parametrize("settings", _OURS.values(), ids=_OURS)
def test_overlap_is_found(tmp_path: Path, settings: dict[str, Any]) -> None:
    loop = Loop(**settings)
    overlap = overlap_of(loop, tmp_path)
    assert (overlap.side_stream, overlap.consumer_stream) == (SIDE, CONSUMER)
    assert [len(step.works) for step in overlap.steps] == [loop.num_kernels] * 12
    # One batch for each step: those before the trace, or those beyond its end.
    ahead = loop.depth - 1
    first, count = (0, 12 + ahead) if loop.is_fresh else (ahead, 12)
    used_by = [batch.step_index for batch in overlap.batches]
    assert used_by == list(range(first, first + count))
    for batch in overlap.batches:
        copies = len(loop.copies_us) + len(loop.transform_us)
        assert len(batch.copies) == copies
        assert len(batch.transforms) == len(loop.transform_us)
    # All but those before which the GPU had nothing to do.
    assert len(overlap.steady_batches) >= count - loop.depth
    assert overlap.inside_share == 1.0
    assert overlap.copy_hidden_share > 0.97
    assert overlap.transform_hidden_share > 0.97 or not loop.transform_us
    assert overlap.idle_share < 0.01


@pytest.mark.parametrize("has_ranges", [True, False])
@pytest.mark.parametrize("transform_us", [(36.0,), (20.0, 20.0, 20.0)])
def test_a_plain_loop_hides_nothing(
    tmp_path: Path, has_ranges: bool, transform_us: tuple[float, ...]
) -> None:
    loop = Loop(is_plain=True, has_ranges=has_ranges, transform_us=transform_us)
    overlap = overlap_of(loop, tmp_path)
    assert (overlap.side_stream, overlap.consumer_stream) == (None, CONSUMER)
    assert [batch.step_index for batch in overlap.batches] == list(range(12))
    assert all(batch.copy_us > 100 for batch in overlap.batches)
    assert all(batch.transform_us == sum(transform_us) for batch in overlap.batches)
    assert overlap.hidden_share == 0.0
    assert overlap.inside_share == 0.0
    assert {batch.inside_step for batch in overlap.batches} == {None}


def test_a_plain_loop_with_a_transform_of_its_own(tmp_path: Path) -> None:
    """Its kernels have any name; numbers that they send along begin no batch."""
    loop = Loop(is_plain=True, transform_us=(20.0,) * 3, transform_name="elementwise")
    overlap = overlap_of(loop, tmp_path)
    assert [batch.step_index for batch in overlap.batches] == list(range(12))
    assert len(overlap.steps) == 12
    assert overlap.hidden_share == overlap.inside_share == 0.0


def test_a_gpu_that_waits_for_its_host_hides_little(tmp_path: Path) -> None:
    overlap = overlap_of(Loop(host_us=9000.0, kernel_us=40.0), tmp_path)
    assert overlap.side_stream == SIDE
    assert overlap.hidden_share < 0.4
    assert overlap.inside_share == 0.0  # Each is issued when the step before is over.
    assert overlap.idle_share > 0.7
    assert len(overlap.gaps) > 12 * 30


def test_hidden_time_is_that_of_the_common_microseconds(tmp_path: Path) -> None:
    """Two batches drawn by hand: one half under a kernel, one beside all of them."""
    rows = [
        # name, kind, stream, launched, start, duration
        ("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", SIDE, 0, 100, 100),
        ("gemm", "kernel", CONSUMER, 10, 50, 70),
        ("gemm", "kernel", CONSUMER, 11, 170, 50),
        ("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", SIDE, 20, 300, 100),
        ("gemm", "kernel", CONSUMER, 30, 500, 70),
    ]
    events: list[dict[str, Any]] = []
    for number, (name, kind, stream, launched, start, duration) in enumerate(rows):
        args = {"correlation": number, "device": 0, "stream": stream, "bytes": 1000}
        event = {"ph": "X", "cat": kind, "name": name, "pid": 0, "tid": stream}
        events.append({**event, "ts": start, "dur": duration, "args": args})
        call = {"ph": "X", "cat": "cuda_runtime", "name": "call", "pid": 1, "tid": 1}
        events.append({**call, "ts": launched, "dur": 1, "args": args})
    path = write_trace(tmp_path / "t.json", {"traceEvents": events})
    overlap = find_overlap(read_trace(path), depth=1)
    first, second = overlap.batches
    assert first.hidden_copy_us == 20 + 30  # From 100 to 120, and from 170 to 200.
    assert second.hidden_copy_us == 0.0
    assert overlap.hidden_share == pytest.approx(50 / 200)
    assert [(gap.start_us, gap.duration_us) for gap in overlap.gaps] == [
        (120.0, 50.0),
        (220.0, 280.0),
    ]


def test_works_launched_before_the_trace_belong_to_no_batch(tmp_path: Path) -> None:
    """What was queued when the profiler began has no launch in the trace."""
    built = Loop(has_ranges=False).build()
    calls = [e for e in built["traceEvents"] if e.get("cat") == "cuda_runtime"]
    forgotten = {call["args"]["correlation"] for call in calls[:44]}  # One step.
    built["traceEvents"] = [
        event
        for event in built["traceEvents"]
        if event.get("cat") != "cuda_runtime"
        or event["args"]["correlation"] not in forgotten
    ]
    overlap = find_overlap(read_trace(write_trace(tmp_path / "t.json", built)))
    assert len(overlap.batches) == len(overlap.steps) == 11
    # The second batch lies in the first step, which the trace only sees the end of.
    assert overlap.batches[0].inside_step == -1
    assert overlap.batches[0].is_inside_earlier_step
    assert overlap.batches[0] not in overlap.steady_batches


def test_collectives_are_not_the_loop(tmp_path: Path) -> None:
    """In distributed training the longest kernels may wait for other ranks."""
    built = Loop(num_steps=3).build()
    spare = {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllReduce", "pid": 0}
    args = {"correlation": 5, "device": 0, "stream": 30}
    origin = min(e["ts"] for e in built["traceEvents"] if e["ph"] == "X")
    call = {"ph": "X", "cat": "cuda_runtime", "name": "c", "pid": LOOP, "tid": AUTOGRAD}
    built["traceEvents"] += [
        {**spare, "tid": 30, "ts": origin + 50, "dur": 9e6, "args": args},
        {**call, "ts": origin + 40, "dur": 1, "args": args},
    ]
    overlap = find_overlap(read_trace(write_trace(tmp_path / "t.json", built)))
    assert (overlap.side_stream, overlap.consumer_stream) == (SIDE, CONSUMER)
