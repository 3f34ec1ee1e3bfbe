"""What would ``torch.profiler`` write of a training loop on a GPU that is not here?

A small model of a host and a GPU: the host launches in order, each stream runs its
work in order, the consumer stream waits for the batch's event, and the loop's thread is
at most a few steps ahead. The events have the fields of torch 2.11's Chrome traces on
CUDA.
"""

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["AUTOGRAD", "CONSUMER", "SIDE", "Loop", "write_trace"]

CONSUMER, SIDE = 7, 20  # Numbers of the streams, as CUDA gives them.
LOOP, AUTOGRAD, FEEDER = 4000, 4071, 4090  # Threads; the first is the process, too.

_LAUNCH_DELAY_US = 5.0
_LAUNCH_US = 8.0
_KERNEL_GAP_US = 1.5


_FORWARD = (
    "void cutlass::Kernel2<cutlass_80_tensorop_s1688fprop_optimized_tf32>(Params)"
)
_BACKWARD = (
    "void cutlass::Kernel2<cutlass_80_tensorop_s1688dgrad_optimized_tf32>(Params)"
)


@dataclass(slots=True)
class Loop:
    """The loop to be pictured; times in microseconds.

    ``build`` gives the trace; it may be called once.
    """

    num_steps: int = 12
    depth: int = 2
    num_kernels: int = 40
    """In a step; half of them in the backward pass."""
    kernel_us: float = 120.0
    copies_us: tuple[float, ...] = (118.0, 2.0)
    """Copies of one batch, image first."""
    transform_us: tuple[float, ...] = (36.0,)
    """Kernels of the transform; each of them sends its numbers along first."""
    transform_name: str = "augment"
    host_us: float = 2200.0
    """Of the host for one step; more than the kernels need: the GPU waits."""
    is_plain: bool = False
    """Copy and transform in the loop, on the consumer stream, with no loader."""
    has_ranges: bool = True
    """The loader's named ranges and ``profiler.step``'s are there."""
    is_fresh: bool = False
    """The trace begins with the pass, and not in its middle."""
    first_ts: float = 5121196447466.033
    """What torch's clock shows at the begin."""

    _now: float = 0.0
    _free: dict[int, float] = field(default_factory=dict)
    _begun: list[float] = field(default_factory=list)
    _ready: list[float] = field(default_factory=list)
    _events: list[dict[str, Any]] = field(default_factory=list)
    _correlation: int = 1000

    def build(self) -> dict[str, Any]:
        """Run the model.

        Returns:
            What the file holds.
        """
        if not self.is_fresh and not self.is_plain:
            # Issued before the trace, and long since ready.
            self._ready = [0.0] * (self.depth - 1)
        for step in range(self.num_steps):
            began = self._now
            self._step(step)
            if self.has_ranges:
                self._host(f"ProfilerStep#{step}", "user_annotation", began)
        return {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}],
            "displayTimeUnit": "ms",
            "baseTimeNanoseconds": 1759000000000000000,
            "traceEvents": [*self._events, *_metadata(self.first_ts)],
            "traceName": "trace.json",
        }

    # The loop #

    def _step(self, step: int) -> None:
        if self.is_plain:
            self._issue(CONSUMER)
        else:
            self._next(step)
        share = self.host_us / self.num_kernels
        for number in range(self.num_kernels):
            is_backward = number >= self.num_kernels // 2
            began = self._now
            start = self._launch(
                _BACKWARD if is_backward else _FORWARD,
                "kernel",
                self.kernel_us,
                stream=CONSUMER,
                thread=AUTOGRAD if is_backward else LOOP,
                not_before=0.0 if self.is_plain else self._ready[step],
            )
            if number == 0:
                self._begun.append(start)
            self._now = max(self._now, began + share)
            if not is_backward:
                self._host("aten::conv2d", "cpu_op", began)

    def _next(self, step: int) -> None:
        # The host pauses until the GPU has begun the step that is this far back.
        lead = self.depth + 1
        if step >= lead:
            self._now = max(self._now, self._begun[step - lead])
        while len(self._ready) < step + self.depth:
            self._ready.append(self._issue(SIDE))
            if self.has_ranges:
                packed = self._now - 180.0
                self._host("gpuprefetch::pin", "user_annotation", packed, FEEDER)
        if self.has_ranges:
            self._host("gpuprefetch::hand-off", "user_annotation", self._spend(20.0))

    def _issue(self, stream: int) -> float:
        """Launch what makes one batch ready, and say when it will be."""
        began = self._spend(10.0)
        kind = "Memcpy HtoD (Pinned -> Device)"
        for duration in self.copies_us:
            size = int(duration * 53e3)
            start = self._launch(kind, "gpu_memcpy", duration, stream=stream, size=size)
            ready = start + duration
        named = self.has_ranges and stream == SIDE
        if named:
            self._host("gpuprefetch::copy", "user_annotation", began)
        began = self._spend(30.0)
        for duration in self.transform_us:
            self._launch(kind, "gpu_memcpy", 1.0, stream=stream, size=4096)
            start = self._launch(self.transform_name, "kernel", duration, stream=stream)
            ready = start + duration
        if named and self.transform_us:
            self._host("gpuprefetch::transform", "user_annotation", began)
        return ready

    # Its events #

    def _spend(self, duration: float) -> float:
        began = self._now
        self._now += duration
        return began

    def _host(self, name: str, kind: str, began: float, thread: int = LOOP) -> None:
        """Note what a thread did from ``began`` until now."""
        self._add(
            kind, name, began, max(self._now - began, 1.0), LOOP, thread, {"Ev Idx": 0}
        )

    def _launch(
        self,
        name: str,
        kind: str,
        duration: float,
        *,
        stream: int,
        thread: int = LOOP,
        size: int = 0,
        not_before: float = 0.0,
    ) -> float:
        """Launch one piece of work.

        Returns:
            When the GPU begins it.
        """
        self._correlation += 1
        call = "cudaMemcpyAsync" if kind == "gpu_memcpy" else "cudaLaunchKernel"
        args: dict[str, Any] = {"External id": 1, "correlation": self._correlation}
        self._add("cuda_runtime", call, self._now, _LAUNCH_US, LOOP, thread, args)
        queued = self._free.get(stream, 0.0) + _KERNEL_GAP_US
        start = max(self._now + _LAUNCH_DELAY_US, queued, not_before + 2.0)
        self._free[stream] = start + duration
        self._now += _LAUNCH_US
        where = {"device": 0, "context": 1, "stream": stream}
        extra = {"bytes": size} if kind == "gpu_memcpy" else {"grid": [132, 1, 1]}
        self._add(kind, name, start, duration, 0, stream, {**args, **where, **extra})
        for phase, tid, when in (("s", thread, self._now), ("f", stream, start)):
            self._events.append(
                {"ph": phase, "cat": "ac2g", "name": "ac2g", "id": self._correlation}
                | {"pid": LOOP, "tid": tid, "ts": self.first_ts + when}
            )
        return start

    def _add(
        self,
        kind: str,
        name: str,
        start: float,
        duration: float,
        pid: int,
        tid: int,
        args: dict[str, Any],
    ) -> None:
        when = round(self.first_ts + start, 3)
        self._events.append(
            {"ph": "X", "cat": kind, "name": name, "pid": pid, "tid": tid}
            | {"ts": when, "dur": round(duration, 3), "args": args}
        )


def _metadata(ts: float) -> Iterator[dict[str, Any]]:
    for tid, name in ((LOOP, "python"), (AUTOGRAD, "pt_autograd_0")):
        label = {"name": f"thread {tid} ({name})"}
        yield _note("thread_name", ts, LOOP, tid, label)
    for stream in (CONSUMER, SIDE):
        yield _note("thread_name", ts, 0, stream, {"name": f"stream {stream} "})
    yield _note("process_name", ts, LOOP, 0, {"name": "python"})
    yield {"ph": "X", "cat": "Trace", "ts": ts, "dur": 1e5, "pid": "Spans"} | {
        "tid": "PyTorch Profiler",
        "name": "PyTorch Profiler (0)",
        "args": {"Op count": 0},
    }
    yield {"name": "Record Window End", "ph": "i", "s": "g", "pid": "", "tid": ""} | {
        "ts": ts
    }


def _note(
    name: str, ts: float, pid: int, tid: int, args: dict[str, str]
) -> dict[str, Any]:
    return {"ph": "M", "name": name, "ts": ts, "pid": pid, "tid": tid, "args": args}


def write_trace(path: Path, trace: dict[str, Any]) -> Path:
    """Write what :meth:`Loop.build` gave, compressed if the name ends with ``.gz``."""
    text = json.dumps(trace)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path
