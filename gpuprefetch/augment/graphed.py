"""``GraphedTransform(fn)``: a device transform of fixed shape, replayed as a CUDA
graph.

For what does not fuse but always does the same work: a frozen encoder, a chain of the
user's own. Replaying a graph costs the host a few microseconds however many kernels it
holds.

A call copies the inputs into the graph's own buffers, replays, and copies the results
out, so that results belong to the caller. One graph is captured per *signature*
(shapes, strides, dtypes, devices of the tensors, values of everything else). Beyond
``max_signatures``, and off CUDA, the function runs as it is.

Random numbers: the graph draws from torch's generator of the device. Torch advances
that generator at each replay, so a replay draws what an eager call would have drawn.

[Note: Two streams, one graph] The graph's buffers are shared by all calls. A call makes
its stream wait for the last replay, wherever that ran, before it writes to them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from gpuprefetch.errors import SettingError

__all__ = ["GraphedTransform"]

logger = logging.getLogger(__name__)

_WARM_UP_CALLS = 3  # Libraries choose algorithms and allocate workspaces in the first.


@dataclass(slots=True)
class _Captured:
    """One graph and the memory that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    outputs: list[Tensor]
    spec: pytree.TreeSpec
    results: list[Any]
    """The function's results, leaf by leaf; tensors stand in for themselves."""
    done: torch.cuda.Event
    """Recorded after the copies out of ``outputs``; the next call waits for it."""


class GraphedTransform:
    """A callable that captures ``fn`` once per signature and replays it.

    Args:
        fn: Called with tensors on a CUDA device, and other values that it only reads.
            It must do the same device work every time, must not wait for the device,
            and must return tensors in any nesting. It runs without gradients.
        max_signatures: Graphs kept; each holds its own inputs, outputs and
        intermediates.

    Raises:
        SettingError: ``max_signatures`` is below 1.
    """

    def __init__(self, fn: Callable[..., Any], *, max_signatures: int = 4) -> None:
        if max_signatures < 1:
            raise SettingError(
                f"max_signatures must be at least 1, got {max_signatures}. To capture "
                "nothing, pass the function itself."
            )
        self.fn = fn
        self.max_signatures = max_signatures
        self._captured: dict[object, _Captured] = {}
        self._lock = (
            threading.Lock()
        )  # One thread at a time writes to a graph's buffers.
        self._has_warned = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replay for these arguments, or run the function as it is.

        Returns:
            What ``fn`` returns; the tensors are the caller's own.
        """
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if not tensors or any(not tensor.is_cuda for tensor in tensors):
            return self.fn(*args, **kwargs)
        signature = (spec, *(_describe(leaf) for leaf in leaves))
        with self._lock, torch.no_grad():
            captured = self._captured.get(signature)
            if captured is None:
                if len(self._captured) >= self.max_signatures:
                    self._warn_once(signature)
                    return self.fn(*args, **kwargs)
                captured = self._capture(leaves, spec)
                self._captured[signature] = captured
            return _replay(captured, tensors)

    def _capture(self, leaves: list[Any], spec: pytree.TreeSpec) -> _Captured:
        device = next(leaf.device for leaf in leaves if isinstance(leaf, Tensor))
        static = [
            torch.empty_like(leaf).copy_(leaf) if isinstance(leaf, Tensor) else leaf
            for leaf in leaves
        ]
        args, kwargs = pytree.tree_unflatten(static, spec)
        random_state = torch.cuda.get_rng_state(device)
        side: torch.cuda.Stream = _make(torch.cuda.Stream, device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP_CALLS):
                self.fn(*args, **kwargs)
        torch.cuda.current_stream(device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads may allocate meanwhile: only this one is held to capture's
        # rules.
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            returned = self.fn(*args, **kwargs)
        # Warming up and capturing drew numbers; the user's sequence must not notice.
        torch.cuda.set_rng_state(random_state, device)
        results, out_spec = pytree.tree_flatten(returned)
        return _Captured(
            graph,
            [leaf for leaf in static if isinstance(leaf, Tensor)],
            [leaf for leaf in results if isinstance(leaf, Tensor)],
            out_spec,
            results,
            _make(torch.cuda.Event),
        )

    def _warn_once(self, signature: object) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        logger.warning(
            "%d signatures are captured already; others run without a graph, such as "
            "%s. Raise max_signatures, or keep shapes fixed with drop_last=True.",
            self.max_signatures,
            signature,
        )

    def __repr__(self) -> str:
        """The function, and how many signatures are captured."""
        return (
            f"GraphedTransform({self.fn!r}, captured={len(self._captured)} of "
            f"{self.max_signatures})"
        )


def _make(kind: Any, *args: object) -> Any:
    """Torch's stream and event classes carry no types."""
    return kind(*args)


def _describe(leaf: Any) -> object:
    """What has to be equal for a graph to fit."""
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device
    try:
        hash(leaf)
    except TypeError:
        return id(leaf)
    return leaf


def _replay(captured: _Captured, tensors: list[Tensor]) -> Any:
    stream = torch.cuda.current_stream(tensors[0].device)
    stream.wait_event(captured.done)  # See [Note: Two streams, one graph].
    for static, tensor in zip(captured.inputs, tensors, strict=True):
        static.copy_(tensor)
    captured.graph.replay()
    copies = iter([output.clone() for output in captured.outputs])
    captured.done.record(stream)
    results = [
        next(copies) if isinstance(leaf, Tensor) else leaf for leaf in captured.results
    ]
    return pytree.tree_unflatten(results, captured.spec)
