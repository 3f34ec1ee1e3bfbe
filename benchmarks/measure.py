"""How fast is a loop, and what does it cost on the host and on the device?

:func:`time_loop` is the measurement that counts. :func:`probe_loop` looks into the
pipeline of the same loop, without the training step, under torch's profiler: its counts
are exact, and nothing that it times is used as a speed.
"""

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from benchmarks.loops import Loop, Trainer, no_step

__all__ = [
    "Probe",
    "Timing",
    "added_bytes",
    "allocated_bytes",
    "in_turns",
    "probe_loop",
    "synchronize",
    "time_loop",
    "work_on_device",
]

# Calls in which the host waits until the device has done something. Not among them:
# waiting for an event, which limits how far the host is ahead; the wait for the whole
# device, which only measuring does; and a copy from pageable memory.
_WAITS = ("cudaStreamSynchronize", "cudaMemcpy")

_PROBED_BATCHES = 4  # A chain of hundreds of launches makes the profiler slow.
_HOST_BATCHES = 20


@dataclass(frozen=True, slots=True)
class Timing:
    """One timed run of a loop."""

    steps_per_s: float
    peak_device_bytes: int | None
    """As torch's allocator counts; ``None`` off CUDA."""
    pinned_bytes: int | None
    """Page-locked memory beyond that before the run; ``None`` off CUDA."""
    started: float
    """Of the timed region, by ``time.perf_counter``."""
    ended: float


@dataclass(frozen=True, slots=True)
class Probe:
    """What a pipeline costs per batch, the training step left out."""

    host_ms: float
    gpu_ms: float | None = None
    launches: float | None = None
    host_syncs: float | None = None


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def in_turns(names: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Give (round, name), each name once a round, in another order each round."""
    for number in range(rounds):
        turn = number % len(names)
        for name in [*names[turn:], *names[:turn]]:
            yield number, name


def time_loop(
    start: Callable[[], Loop], device: torch.device, *, steps: int, warmup: int
) -> Timing:
    """Run a loop; the device is synchronized inside the timed region.

    Args:
        start: Makes the loop, which is closed afterwards.
        device: Where it trains.
        steps: How many are timed: at least ten times what the pipeline prefetches.
        warmup: How many come before; the pipeline is in its steady state after them.
    """
    gc.collect()
    pinned_before = _pinned_bytes(device)
    loop = start()
    try:
        for _ in range(warmup):
            loop.advance()
        synchronize(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        started = time.perf_counter()
        for _ in range(steps):
            loop.advance()
        synchronize(device)
        ended = time.perf_counter()
        return Timing(
            steps / (ended - started),
            _peak_device_bytes(device),
            added_bytes(_pinned_bytes(device), pinned_before, loop.pinned_bytes),
            started,
            ended,
        )
    finally:
        loop.close()


def allocated_bytes(device: torch.device) -> int:
    """Count what torch's allocator has handed out on the device and not got back."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _peak_device_bytes(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    return torch.cuda.max_memory_allocated(device)


def _pinned_bytes(device: torch.device) -> int | None:
    """Page-locked bytes that torch's own allocator has taken from the driver."""
    if device.type != "cuda" or not hasattr(torch.cuda, "host_memory_stats"):
        return None
    return int(torch.cuda.host_memory_stats()["allocated_bytes.current"])


def added_bytes(now: int | None, before: int | None, own: int = 0) -> int | None:
    """Count what came on top of what was there before, and of what is not counted.

    Args:
        now: Bytes counted; ``None``: they cannot be.
        before: The same, earlier.
        own: Bytes that neither counts.
    """
    if now is None or before is None:
        return None
    return max(now - before, 0) + own


def probe_loop(trainer: Trainer, device: torch.device) -> Probe:
    """Count what the pipeline of a loop does per batch."""
    loop = trainer(no_step)
    try:
        for _ in range(4):
            loop.advance()
        host_ms = _host_ms(loop, device)
        if device.type != "cuda":
            return Probe(host_ms)
        found = _profile(loop, device)
    finally:
        loop.close()
    per_batch = {name: count / _PROBED_BATCHES for name, count in found.items()}
    return Probe(
        host_ms,
        gpu_ms=per_batch.get("gpu_us", 0.0) / 1e3,
        launches=per_batch.get("launches", 0.0),
        host_syncs=per_batch.get("waits", 0.0),
    )


def _host_ms(loop: Loop, device: torch.device) -> float:
    """Processor time of this thread per batch, the device idle when each begins."""
    spent = 0
    for _ in range(_HOST_BATCHES):
        synchronize(device)
        started = time.thread_time_ns()
        loop.advance()
        spent += time.thread_time_ns() - started
    return spent / _HOST_BATCHES / 1e6


def _profile(loop: Loop, device: torch.device) -> Counter[str]:
    synchronize(device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        for _ in range(_PROBED_BATCHES):
            loop.advance()
        synchronize(device)
    found: Counter[str] = Counter()
    for event in work_on_device(recorded):
        found["gpu_us"] += event.time_range.elapsed_us()
        found["launches"] += not event.name.startswith(("Memcpy", "Memset"))
    found["waits"] = sum(event.name in _WAITS for event in recorded.events() or ())
    return found


def work_on_device(recorded: profile) -> list[FunctionEvent]:
    """List the kernels, copies and fills that a profiler saw on the device.

    Ranges that were opened on the host, such as the loader's own, lie on the device's
    timeline too; they are left out.
    """
    return [
        event
        for event in recorded.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA
        and not event.is_user_annotation
    ]
