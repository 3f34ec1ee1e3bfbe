"""``GraphedTransform(fn)``: a device transform of fixed shape, replayed as a CUDA
graph.

For what does not fuse but always does the same work: a frozen encoder, a chain of the
user's own. Replaying a graph costs the host a few microseconds however many kernels it
holds.

A call copies the inputs into the graph's own buffers, replays, and copies the results
out, so that results belong to the caller. One graph is captured per *signature*: the
tensors' shapes, strides, dtypes and devices, the values of everything else, autocast,
and whether ``fn`` trains. Without a graph run: what has more signatures than
``max_signatures``, batches shorter than one that was captured, tensors off CUDA, and
calls inside another capture, which then becomes part of that one.

Random numbers: the graph draws from torch's generator of the device. Torch advances
that generator at each replay, so a replay draws what an eager call would have drawn.

[Note: Two streams, one graph] The graph's buffers are shared by all calls. A call makes
its stream wait for the last replay, wherever that ran, before it writes to them.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gpuprefetch.augment.fused import FusedAugmentation
from gpuprefetch.errors import SettingError, TransformError
from gpuprefetch.kinds import is_kornia_module

__all__ = ["GraphedTransform"]

logger = logging.getLogger(__name__)

_WARM_UP_CALLS = 3  # Libraries choose algorithms and allocate workspaces in the first.

_capturing = threading.Lock()  # Torch allows one capture at a time in a process.


class GraphedTransform:
    """A callable that captures ``fn`` once per signature and replays it.

    Args:
        fn: Called with tensors on a CUDA device, and other values that it only reads.
            It must do the same device work every time, must not wait for the device nor
            draw numbers on the host, and must return tensors in any nesting. It runs
            without gradients, and four times more at each capture. Its weights may
            change in place; once they are moved or cast, make a new object.
        max_signatures: Graphs kept; each holds its own inputs, outputs and
            intermediates.

    Raises:
        SettingError: ``max_signatures`` is below 1, or ``fn`` holds an augmentation of
            Kornia's, whose numbers a graph would repeat for ever.
    """

    def __init__(self, fn: Callable[..., Any], *, max_signatures: int = 4) -> None:
        if max_signatures < 1:
            raise SettingError(
                f"max_signatures must be at least 1, got {max_signatures}. To capture "
                "nothing, pass the function itself."
            )
        _require_no_host_draws(fn)
        self.fn = fn
        self.max_signatures = max_signatures
        self._start()

    def _start(self) -> None:
        self._captured: dict[object, _Captured] = {}
        # Sizes of the first axes that were captured, by what else a signature holds.
        self._lengths: dict[object, list[tuple[int, ...]]] = {}
        self._lock = threading.Lock()  # One thread at a time fills a graph's buffers.
        self._has_warned = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replay for these arguments, or run the function as it is.

        Returns:
            What ``fn`` returns; the tensors are the caller's own.

        Raises:
            TransformError: ``fn`` runs, but cannot be captured.
        """
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        with torch.no_grad():
            captured = None
            if _is_on_cuda(tensors) and not _is_capturing():
                captured = self._find(leaves, spec, tensors)
            if captured is None:
                return self.fn(*args, **kwargs)
            with self._lock:
                return _replay(captured, tensors)

    def without_draws(self, inputs: tuple[Any, ...]) -> Callable[[], Any] | None:
        """Give what replays for these inputs, if no random number is drawn there.

        A loader then need not set generators, which takes longer than the replay.

        Returns:
            None where there is no such graph, or not yet: call the transform itself.
        """
        leaves, spec = pytree.tree_flatten((inputs, {}))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if not _is_on_cuda(tensors) or _is_capturing() or _why_not(leaves, tensors):
            return None
        captured = self._captured.get(_signature(self.fn, leaves, spec, tensors))
        if captured is None or captured.draws:
            return None

        def replay() -> Any:
            with torch.no_grad(), self._lock:
                return _replay(captured, tensors)

        return replay

    def _find(
        self, leaves: list[Any], spec: pytree.TreeSpec, tensors: list[Tensor]
    ) -> _Captured | None:
        """The graph for these arguments, captured now if need be; None: there is none.

        It may take long, and other threads wait meanwhile.
        """
        reason = _why_not(leaves, tensors)
        if reason:
            self._warn_once(reason)
            return None
        signature = kind, lengths = _signature(self.fn, leaves, spec, tensors)
        captured = self._captured.get(signature)
        if captured is not None:
            return captured
        with self._lock:
            if signature in self._captured:  # Another thread was faster.
                return self._captured[signature]
            if any(_is_shorter(lengths, one) for one in self._lengths.get(kind, ())):
                return None
            if len(self._captured) >= self.max_signatures:
                self._warn_once(
                    f"{self.max_signatures} signatures are captured already; raise "
                    "max_signatures, or keep shapes fixed with drop_last=True"
                )
                return None
            captured = self._captured[signature] = _capture(self.fn, leaves, spec)
            self._lengths.setdefault(kind, []).append(lengths)
            return captured

    def _warn_once(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning("%r runs some calls without a graph: %s.", self, reason)

    def __getstate__(self) -> dict[str, Any]:
        """Graphs stay behind: a copy captures its own."""
        return {"fn": self.fn, "max_signatures": self.max_signatures}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    def __repr__(self) -> str:
        """The function, and how many signatures are captured."""
        name = getattr(self.fn, "__qualname__", type(self.fn).__name__)
        return (
            f"GraphedTransform({name}, captured={len(self._captured)} of "
            f"{self.max_signatures})"
        )


# What can be captured #


def _require_no_host_draws(fn: Callable[..., Any]) -> None:
    members = fn.modules() if isinstance(fn, nn.Module) else ()
    for member in members:
        if isinstance(member, FusedAugmentation) or is_kornia_module(member):
            raise SettingError(
                f"a graph would repeat the numbers that {type(member).__name__} draws "
                "on the host. Pass the augmentation as transform= itself: it fuses."
            )


def _is_on_cuda(tensors: list[Tensor]) -> bool:
    return bool(tensors) and all(tensor.is_cuda for tensor in tensors)


def _is_capturing() -> bool:
    return torch.cuda.is_current_stream_capturing()


def _why_not(leaves: list[Any], tensors: list[Tensor]) -> str:
    """Why these arguments cannot belong to a graph; empty: they can."""
    if any(tensor.device != tensors[0].device for tensor in tensors):
        return "the tensors lie on different devices"
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            if type(leaf) not in (Tensor, nn.Parameter) or leaf.layout != torch.strided:
                return f"a {type(leaf).__name__} with layout {leaf.layout} was passed"
        elif not _is_hashable(leaf):
            return f"a {type(leaf).__name__} was passed, which may change unseen"
    return ""


def _is_hashable(leaf: object) -> bool:
    try:
        hash(leaf)
    except TypeError:
        return False
    return True


def _signature(
    fn: Callable[..., Any], leaves: list[Any], spec: Any, tensors: list[Tensor]
) -> tuple[object, tuple[int, ...]]:
    """What has to be equal for a graph to fit; first axes' lengths are on their own."""
    kind = (spec, _modes(fn), *map(_describe, leaves))
    return kind, tuple(len(one) if one.ndim else 0 for one in tensors)


def _modes(fn: Callable[..., Any]) -> object:
    """What decides, besides the arguments, which work ``fn`` does."""
    autocast = torch.get_autocast_dtype("cuda")
    is_autocast = torch.is_autocast_enabled("cuda")
    return is_autocast and autocast, getattr(fn, "training", None)


def _describe(leaf: Any) -> object:
    """What has to be equal for a graph to fit, but for the first axis's length."""
    if isinstance(leaf, Tensor):
        return leaf.shape[1:], leaf.stride(), leaf.dtype, leaf.device
    return type(leaf), leaf  # 1 equals True and 1.0.


def _is_shorter(lengths: tuple[int, ...], than: tuple[int, ...]) -> bool:
    return lengths != than and all(map(int.__le__, lengths, than))


# Capture and replay #


@dataclass(slots=True)
class _Captured:
    """One graph and the memory that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    stream: torch.cuda.Stream
    """On which ``inputs`` were allocated."""
    inputs: list[Tensor]
    outputs: list[Tensor]
    spec: pytree.TreeSpec
    results: list[Any]
    """The function's results, leaf by leaf; tensors stand in for themselves."""
    done: torch.cuda.Event
    """Recorded after the copies out of ``outputs``; the next call waits for it."""
    weights: list[Tensor]
    """Keeps the memory of the function's weights, whose addresses the graph holds."""
    draws: bool
    """The graph moves the device's random generator on."""


def _capture(fn: Callable[..., Any], leaves: list[Any], spec: Any) -> _Captured:
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
            _capturing,
            torch.cuda.stream(stream),
            _draws_undone(device),
            _no_cast_cache(),
        ):
            offset = _generator_offset()
            graph, returned = _record(lambda: fn(*args, **kwargs))
            draws = _generator_offset() != offset
    results, out_spec = pytree.tree_flatten(returned)
    weights = fn.parameters() if isinstance(fn, nn.Module) else ()
    return _Captured(
        graph,
        stream,
        [leaf for leaf in static if isinstance(leaf, Tensor)],
        [leaf for leaf in results if isinstance(leaf, Tensor)],
        out_spec,
        results,
        _make(torch.cuda.Event),
        [weight.detach() for weight in weights],
        draws,
    )


def _generator_offset() -> int:
    """How far the current device's random generator has come."""
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    return int(generator.get_offset())


def _record(work: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Warm up on a side stream and capture there, on the current device."""
    side: torch.cuda.Stream = _make(torch.cuda.Stream)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM_UP_CALLS):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    # Other threads may allocate meanwhile: only this one is held to capture's rules.
    how: dict[str, Any] = {"pool": pool, "capture_error_mode": "thread_local"}
    try:
        with torch.cuda.graph(graph, stream=side, **how):
            return graph, work()
    except Exception as error:
        _recover(pool)
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
        logger.warning(
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


def _replay(captured: _Captured, tensors: list[Tensor]) -> Any:
    stream = torch.cuda.current_stream(tensors[0].device)
    stream.wait_event(captured.done)  # See [Note: Two streams, one graph].
    for static, tensor in zip(captured.inputs, tensors, strict=True):
        static.copy_(tensor)
        if stream != captured.stream:
            # Should this object go, its memory waits for this stream too.
            static.record_stream(stream)
    captured.graph.replay()
    copies = iter([output.clone() for output in captured.outputs])
    captured.done.record(stream)
    results = [
        next(copies) if isinstance(leaf, Tensor) else leaf for leaf in captured.results
    ]
    return pytree.tree_unflatten(results, captured.spec)
