"""Does memory stay flat over very many batches?

Small batches, so that there are many of them in little time: what leaks, leaks once a
batch or once a pass, and not by the pixel.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import synchronize
from gpuprefetch import StreamPrefetchLoader

__all__ = ["GrewError", "Limits", "Sample", "Served", "growth", "soak"]

_STATM = Path("/proc/self/statm")
# Until then pools fill up and modules are loaded.
_WARMUP_SHARE = 0.2


class GrewError(RuntimeError):
    """Memory was not flat."""


class Served:
    """A source that serves ready batches in turn, a fixed number of them in a pass.

    Args:
        ready: The batches.
        per_pass: How many one pass serves.
    """

    def __init__(self, ready: Sequence[Any], per_pass: int) -> None:
        self._ready = ready
        self._per_pass = per_pass

    def __len__(self) -> int:
        return self._per_pass

    def __iter__(self) -> Iterator[Any]:
        for index in range(self._per_pass):
            yield self._ready[index % len(self._ready)]


@dataclass(frozen=True, slots=True)
class Sample:
    """What was held at one moment, with nothing running on the device."""

    batches: int
    """Yielded so far."""
    seconds: float
    device_bytes: int
    """In live tensors."""
    pinned_bytes: int
    """Page-locked: torch's own and the loader's."""
    rss_bytes: int
    """Of the process, in main memory; 0 where the system does not tell."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Growth over a whole soak that is still called flat, in bytes."""

    device_bytes: int = 1 << 20
    pinned_bytes: int = 1 << 20
    rss_bytes: int = 16 << 20  # Python's and the driver's heaps breathe by some MB.

    def check(self, samples: Sequence[Sample]) -> None:
        """Compare the growth with the limits.

        Raises:
            GrewError: It is above one of them.
        """
        for field in ("device_bytes", "pinned_bytes", "rss_bytes"):
            grown, limit = growth(samples, field), getattr(self, field)
            if grown > limit:
                raise GrewError(
                    f"{field} grew by {grown:.0f} over {samples[-1].batches} batches; "
                    f"at most {limit} are flat"
                )


def soak(
    loader: StreamPrefetchLoader[Any],
    *,
    device: torch.device,
    num_batches: int,
    every: int,
    limit_s: float,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Sample]:
    """Draw batches, pass after pass, and look at the memory now and then.

    Args:
        loader: Of passes that are shorter than ``num_batches``.
        device: Its device.
        num_batches: After how many it ends.
        every: Batches between two looks, each of which waits for the device.
        limit_s: After how many seconds it ends in any case.
        clock: In seconds.
    """
    samples: list[Sample] = []
    started, batches = clock(), 0
    while True:
        for _ in loader:
            batches += 1
            if batches % every:
                continue
            synchronize(device)
            samples.append(_look(loader, device, batches, clock() - started))
            if batches >= num_batches or samples[-1].seconds > limit_s:
                return samples


def _look(
    loader: StreamPrefetchLoader[Any],
    device: torch.device,
    batches: int,
    seconds: float,
) -> Sample:
    on_device = pinned = 0
    if device.type == "cuda":
        on_device = torch.cuda.memory_allocated(device)
        stats = torch.cuda.host_memory_stats()
        # Taken from the driver. Of the bytes in use, torch 2.11 does not take off those
        # of blocks that waited for a copy: they grow by every block.
        pinned = stats["allocated_bytes.current"]
    return Sample(
        batches,
        seconds,
        on_device,
        int(pinned) + loader.stats().pinned_bytes,
        _rss_bytes(),
    )


def _rss_bytes() -> int:
    try:
        pages = int(_STATM.read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def growth(samples: Sequence[Sample], field: str) -> float:
    """Bytes by which a field grows from the first batch to the last, by its slope.

    The slope is that of the straight line nearest to all samples but those of the
    warm-up, so that a single high value at the end means little.
    """
    steady = samples[int(_WARMUP_SHARE * len(samples)) :]
    if len(steady) < 2:
        return 0.0
    batches = [float(one.batches) for one in steady]
    held = [float(getattr(one, field)) for one in steady]
    slope = statistics.linear_regression(batches, held).slope
    return slope * samples[-1].batches
