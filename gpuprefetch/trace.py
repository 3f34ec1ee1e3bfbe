"""What is in a trace that ``torch.profiler`` wrote?

Reads the JSON file of ``profile.export_chrome_trace``, also when it is compressed, into
plain records: what the host's threads did, and what the GPU did, stream by stream. What
the records mean is told by :mod:`gpuprefetch.overlap`; nothing here knows of batches or
of training steps. It needs no GPU, and only the standard library.

All times are in microseconds since the first event of the trace.
"""

import gzip
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gpuprefetch.errors import TraceError

__all__ = ["GpuWork", "HostRange", "Span", "Trace", "read_trace"]

_GZIP_MAGIC = b"\x1f\x8b"

GpuKind = Literal["kernel", "copy", "fill"]
HostKind = Literal["range", "operation", "launch", "python"]

# What torch calls each kind of event, in the field "cat".
_GPU_KINDS: dict[object, GpuKind] = {
    "kernel": "kernel",
    "gpu_memcpy": "copy",
    "gpu_memset": "fill",
}
_HOST_KINDS: dict[object, HostKind] = {
    "user_annotation": "range",
    "cpu_op": "operation",
    "cuda_runtime": "launch",
    "cuda_driver": "launch",
    "xpu_runtime": "launch",
    "python_function": "python",
}

_ALL_KINDS = {**_GPU_KINDS, **_HOST_KINDS}

# Copies from the host, as the profilers of CUDA, ROCm and XPU name them.
_UPLOAD_MARKS = ("HtoD", "HostToDevice", "M2D")


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time."""

    name: str
    start_us: float
    duration_us: float
    """0 for something shorter than the profiler can tell."""

    @property
    def end_us(self) -> float:
        """When it was over."""
        return self.start_us + self.duration_us


@dataclass(frozen=True, slots=True)
class HostRange(Span):
    """One call, or one named range, in a thread of the host."""

    kind: HostKind
    """``range`` is what ``record_function`` names; ``launch`` a call of the driver."""
    thread: int
    """Number that the operating system gave the thread."""


@dataclass(frozen=True, slots=True)
class GpuWork(Span):
    """One kernel, copy or fill on one stream."""

    kind: GpuKind
    device: int
    stream: int
    """The driver's number of the stream; torch's default stream is 7 on CUDA."""
    launched_us: float | None
    """When the host asked for it; ``None`` if that was before the trace began."""
    launch_thread: int | None
    num_bytes: int
    """Of a copy or a fill; 0 for kernels."""

    @property
    def is_upload(self) -> bool:
        """Tell whether it copies from the host's memory to the device's."""
        return self.kind == "copy" and any(m in self.name for m in _UPLOAD_MARKS)

    @property
    def order_us(self) -> float:
        """Place in the host's order of launches; before all of them if unknown."""
        return -1.0 if self.launched_us is None else self.launched_us


@dataclass(frozen=True, slots=True)
class Trace:
    """What one file holds."""

    works: tuple[GpuWork, ...]
    """Of all devices and streams, by start; at least one."""
    ranges: tuple[HostRange, ...]
    """Of all threads, by start."""
    thread_names: Mapping[int, str]
    """As the operating system knows them; Python's own names are not among them."""

    def ranges_named(self, name: str) -> list[HostRange]:
        """Find host ranges by their exact name."""
        return [one for one in self.ranges if one.name == name]


def read_trace(path: Path) -> Trace:
    """Read a file that ``export_chrome_trace`` or ``tensorboard_trace_handler`` wrote.

    Args:
        path: JSON, plain or compressed with gzip, whatever its name.

    Raises:
        TraceError: It is no such trace, or holds no work of a GPU.
        OSError: It cannot be read.
    """
    events = _load_events(path)
    try:
        return _read_events(events, path)
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, TraceError):
            raise
        raise TraceError(
            f"{path} has an event that torch.profiler does not write: {error!r}. "
            "Record the trace anew and leave the file as it is."
        ) from error


# The file #


def _load_events(path: Path) -> list[dict[str, Any]]:
    """Parse the file.

    Returns:
        Its events, in no order.
    """
    try:
        content = path.read_bytes()
        if content.startswith(_GZIP_MAGIC):
            content = gzip.decompress(content)
        # Kernels' names may hold what strict JSON does not allow.
        text = content.decode(errors="replace")
        loaded = json.loads(text, strict=False)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"{path} is cut off or damaged: {error}") from error
    except ValueError as error:
        raise _not_a_trace(path, f"it is not JSON ({error})") from error
    # The format also allows the bare list.
    events = loaded.get("traceEvents") if isinstance(loaded, dict) else loaded
    if not isinstance(events, list):
        raise _not_a_trace(path, "it has no list of traceEvents")
    return [event for event in events if isinstance(event, dict)]


def _not_a_trace(path: Path, reason: str) -> TraceError:
    return TraceError(
        f"{path} is not a trace of torch.profiler: {reason}. "
        "Make one with profiler.export_chrome_trace('trace.json')."
    )


# Its events #


def _read_events(events: list[dict[str, Any]], path: Path) -> Trace:
    timed = [event for event in events if event.get("ph") == "X"]
    if not any(event.get("cat") in _GPU_KINDS for event in timed):
        raise TraceError(
            f"{path} holds no work of a GPU, so there is nothing to see. Profile with "
            "activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], on a machine "
            "with a GPU."
        )
    read = [event for event in timed if event.get("cat") in _ALL_KINDS]
    origin = min(float(event["ts"]) for event in read)
    ranges = [
        _read_range(event, origin) for event in read if event["cat"] in _HOST_KINDS
    ]
    launches = _launches_by_correlation(read, origin)
    works = [
        _read_work(event, origin, launches)
        for event in read
        if event["cat"] in _GPU_KINDS
    ]
    return Trace(
        works=tuple(sorted(works, key=_start)),
        ranges=tuple(sorted(ranges, key=_start)),
        thread_names=_thread_names(events, {one.thread for one in ranges}),
    )


def _start(span: Span) -> float:
    return span.start_us


def _read_range(event: dict[str, Any], origin: float) -> HostRange:
    return HostRange(
        name=str(event["name"]),
        start_us=float(event["ts"]) - origin,
        duration_us=float(event.get("dur", 0.0)),
        kind=_HOST_KINDS[event["cat"]],
        thread=int(event["tid"]),
    )


_Launches = dict[int, tuple[float, int]]  # Correlation to time and thread.


def _launches_by_correlation(events: list[dict[str, Any]], origin: float) -> _Launches:
    """Find the driver's calls, which share a number with the work they started."""
    launches: _Launches = {}
    for event in events:
        if _HOST_KINDS.get(event["cat"]) == "launch":
            correlation = event.get("args", {}).get("correlation")
            if correlation is not None:
                when = float(event["ts"]) - origin
                # A runtime call and the driver call in it may both be there.
                launches.setdefault(int(correlation), (when, int(event["tid"])))
    return launches


def _read_work(event: dict[str, Any], origin: float, launches: _Launches) -> GpuWork:
    args = event.get("args", {})
    launch = launches.get(int(args.get("correlation", -1)))
    # Some exporters leave out the arguments; process and thread say the same.
    return GpuWork(
        name=str(event["name"]),
        start_us=float(event["ts"]) - origin,
        duration_us=float(event.get("dur", 0.0)),
        kind=_GPU_KINDS[event["cat"]],
        device=int(args.get("device", event["pid"])),
        stream=int(args.get("stream", event["tid"])),
        launched_us=None if launch is None else launch[0],
        launch_thread=None if launch is None else launch[1],
        num_bytes=int(args.get("bytes", 0)),
    )


def _thread_names(events: list[dict[str, Any]], threads: set[int]) -> dict[int, str]:
    """Find the names of the host's threads; a stream is a named thread there, too."""
    return {
        event["tid"]: str(event["args"]["name"])
        for event in events
        if event.get("ph") == "M"
        and event.get("name") == "thread_name"
        and event.get("tid") in threads
    }
