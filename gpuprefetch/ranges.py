"""Which part of a step does a profiler see the loader in?

The ranges ``gpuprefetch::wait``, ``::pin``, ``::copy``, ``::transform`` and
``::hand-off`` appear in ``torch.profiler`` and under ``torch.autograd.profiler.
emit_nvtx``, while one of them runs. For Nsight without torch's profiler,
:func:`enable_nvtx` turns them on. Otherwise a range costs one look at two flags.
"""

from typing import Any, Protocol

import torch
from torch.autograd import profiler

__all__ = [
    "COPY",
    "HAND_OFF",
    "PIN",
    "TRANSFORM",
    "WAIT",
    "Range",
    "begin",
    "enable_nvtx",
    "is_nvtx_enabled",
]

# Those who read traces look for these names.
WAIT = "gpuprefetch::wait"
PIN = "gpuprefetch::pin"
COPY = "gpuprefetch::copy"
TRANSFORM = "gpuprefetch::transform"
HAND_OFF = "gpuprefetch::hand-off"


class Range(Protocol):
    """A range that has begun."""

    def end(self) -> None:
        """End it."""


is_nvtx_enabled = False
"""Ranges go to NVTX with no profiler of torch's running; see :func:`enable_nvtx`. To be
read as ``ranges.is_nvtx_enabled``: a name imported from here keeps its old value."""


def enable_nvtx(is_enabled: bool = True) -> None:
    """Send the ranges to NVTX, for Nsight Systems; in all threads, until turned off.

    Not needed under ``torch.profiler`` or ``emit_nvtx``.
    """
    global is_nvtx_enabled
    is_nvtx_enabled = is_enabled


def begin(name: str) -> Range | None:
    """Begin a range; with an empty name there is none."""
    if not name:
        return None
    return _NvtxRange(name) if is_nvtx_enabled else _ProfilerRange(name)


class _ProfilerRange:
    def __init__(self, name: str) -> None:
        record: Any = profiler.record_function
        self._recorded = record(name)
        self._recorded.__enter__()

    def end(self) -> None:
        self._recorded.__exit__(None, None, None)


class _NvtxRange:
    def __init__(self, name: str) -> None:
        torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]

    def end(self) -> None:
        torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]
