"""How is a function captured as a CUDA graph, and how is the graph replayed?

[Note: Two streams, one graph] The graph's buffers are shared by all replays. A replay
makes its stream wait for the last one, wherever that ran, before it writes to them.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gpuprefetch.errors import TransformError
from gpuprefetch.streams import Event, Stream, current_stream, record_use

__all__ = ["Captured", "capture", "is_capturing", "replay"]

_logger = logging.getLogger(__name__)

_WARM_UP_CALLS = 3  # Libraries choose algorithms and allocate workspaces in the first.

_capturing = threading.Lock()  # Torch allows one capture at a time in a process.
_of_thread = threading.local()  # Whether it is this thread that captures.


@dataclass(slots=True)
class Captured:
    """One graph and the memory that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    """What is replayed."""
    inputs: list[Tensor]
    """The graph's own, into which a replay copies the caller's."""
    outputs: list[Tensor]
    """The graph's own, out of which it copies for the caller."""
    spec: pytree.TreeSpec
    """How the results nest."""
    results: list[Any]
    """The function's results, leaf by leaf; tensors stand in for themselves."""
    done: Event
    """Recorded after the copies out of ``outputs``; the next call waits for it."""
    weights: list[Tensor]
    """Keeps the memory of the function's weights, whose addresses the graph holds."""
    draws_numbers: bool
    """The graph moves the device's random generator on."""
    readers: set[Stream]
    """Streams that have used ``inputs``, as the allocator has been told."""


def capture(fn: Callable[..., Any], leaves: list[Any], spec: Any) -> Captured:
    """Capture a function for arguments of one kind, on the current stream.

    Args:
        fn: As ``GraphedTransform`` demands.
        leaves: Its arguments, flattened; tensors on one CUDA device among them.
        spec: How they were nested: ``(args, kwargs)``.

    Returns:
        The graph, with buffers of its own; nothing of it has run for these arguments.

    Raises:
        TransformError: ``fn`` runs, but cannot be captured.
    """
    device = next(leaf.device for leaf in leaves if isinstance(leaf, Tensor))
    with torch.cuda.device(device), torch.inference_mode(False), torch.no_grad():
        stream = torch.cuda.current_stream()
        static = [
            torch.empty_like(leaf).copy_(leaf) if isinstance(leaf, Tensor) else leaf
            for leaf in leaves
        ]
        args, kwargs = pytree.tree_unflatten(static, spec)
        # Restores the stream too, which a failing capture leaves behind as it is.
        with (
            _turn_to_capture(),
            torch.cuda.stream(stream),
            _draws_undone(device),
            _no_cast_cache(),
        ):
            offset = _generator_offset()
            graph, returned = _record(lambda: fn(*args, **kwargs))
            draws_numbers = _generator_offset() != offset
    results, out_spec = pytree.tree_flatten(returned)
    weights = fn.parameters() if isinstance(fn, nn.Module) else ()
    return Captured(
        graph,
        [leaf for leaf in static if isinstance(leaf, Tensor)],
        [leaf for leaf in results if isinstance(leaf, Tensor)],
        out_spec,
        results,
        _make(torch.cuda.Event),
        [weight.detach() for weight in weights],
        draws_numbers,
        {current_stream(device)},
    )


def is_capturing() -> bool:
    """Whether what this thread launches now is to become part of a graph.

    True in the warm-up of :func:`capture` too, of which the stream knows nothing: what
    would capture a graph of its own there has to wait for the end of this one.
    """
    is_here: bool = getattr(_of_thread, "is_capturing", False)
    return is_here or torch.cuda.is_current_stream_capturing()


@contextmanager
def _turn_to_capture() -> Iterator[None]:
    with _capturing:
        _of_thread.is_capturing = True
        try:
            yield
        finally:
            _of_thread.is_capturing = False


def _generator_offset() -> int:
    """How far the current device's random generator has come."""
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    return int(generator.get_offset())


def _record(work: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Warm up on a side stream and capture there, on the current device."""
    side: torch.cuda.Stream = _make(torch.cuda.Stream)
    side.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP_CALLS):
                work()
    finally:
        # Also where the work failed: what it has launched reads memory of ours.
        torch.cuda.current_stream().wait_stream(side)
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    # Other threads may allocate meanwhile: only this one is held to capture's rules.
    how: dict[str, Any] = {"pool": pool, "capture_error_mode": "thread_local"}
    try:
        with torch.cuda.graph(graph, stream=side, **how):
            return graph, work()
    except BaseException as error:
        _recover(pool)
        if not isinstance(error, Exception):  # Ctrl-C.
            raise
        raise TransformError(
            "GraphedTransform: the function runs, but cannot be captured as a CUDA "
            f"graph ({error}). It must not wait for the device, as .item(), .cpu() and "
            "indexing by a mask do, nor copy from host memory. Otherwise pass the "
            "function itself as transform."
        ) from error


def _recover(pool: Any) -> None:
    """Put back in order what torch leaves behind where a capture was broken off.

    Its allocator takes no memory back while it believes that a capture goes on, and the
    device's generator takes itself for captured until the end of another capture.
    """
    close = getattr(torch._C, "_cuda_endAllocateToPool", None)
    if close is not None:
        with suppress(RuntimeError):  # It was closed in good order.
            close(torch.cuda.current_device(), pool)
    graph = torch.cuda.CUDAGraph()
    with (
        suppress(RuntimeError),
        torch.cuda.graph(graph, stream=_make(torch.cuda.Stream)),
    ):
        torch.zeros(1, device="cuda")


@contextmanager
def _draws_undone(device: torch.device) -> Iterator[None]:
    """Warming up and capturing draw; the user's sequence must not notice."""
    on_device = torch.cuda.get_rng_state(device)
    on_host = torch.get_rng_state(), random.getstate()
    try:
        yield
    finally:
        torch.cuda.set_rng_state(on_device, device)
    if not torch.equal(torch.get_rng_state(), on_host[0]) or (
        random.getstate() != on_host[1]
    ):
        _logger.warning(
            "numbers were drawn on the host while a function was captured. If it drew "
            "them, its graph repeats the same ones for ever: draw on the device."
        )


@contextmanager
def _no_cast_cache() -> Iterator[None]:
    """Keep autocast from handing a graph a cast weight that is freed with the cache."""
    was_enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was_enabled)


def _make(kind: Any) -> Any:
    """Torch's stream and event classes carry no types."""
    return kind()


def replay(captured: Captured, tensors: Sequence[Tensor]) -> Any:
    """Enqueue a graph on the current stream; one thread at a time, without gradients.

    Args:
        captured: The graph.
        tensors: Of the shapes, strides and dtypes that it was captured with.

    Returns:
        What the function returned, with tensors of the caller's own.
    """
    stream = current_stream(tensors[0].device)
    captured.done.wait(stream)  # See [Note: Two streams, one graph].
    if stream not in captured.readers:
        # Should this object go, its memory waits for this stream too.
        captured.readers.add(stream)
        for static in captured.inputs:
            record_use(static, stream)
    for static, tensor in zip(captured.inputs, tensors, strict=True):
        static.copy_(tensor)
    captured.graph.replay()
    copies = iter([output.clone() for output in captured.outputs])
    captured.done.record(stream)
    results = [
        next(copies) if isinstance(leaf, Tensor) else leaf for leaf in captured.results
    ]
    return pytree.tree_unflatten(results, captured.spec)
