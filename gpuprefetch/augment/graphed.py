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
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gpuprefetch.augment.capture import Captured, capture, is_capturing, replay
from gpuprefetch.augment.fused import FusedAugmentation
from gpuprefetch.errors import SettingError
from gpuprefetch.kinds import is_hashable, is_kornia_module

__all__ = ["GraphedTransform"]

_logger = logging.getLogger(__name__)

_Signature = tuple[object, tuple[int, ...]]
"""What has to be equal for a graph to fit; the lengths of first axes are on their
own."""


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
        self._captured: dict[_Signature, Captured] = {}
        # The same graphs by what is quicker to tell: see `_quick_key`.
        self._recent: dict[object, Captured] = {}
        self._lock = threading.Lock()  # One thread at a time fills a graph's buffers.
        self._has_warned = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replay for these arguments, or run the function as it is.

        Returns:
            What ``fn`` returns; the tensors are the caller's own.

        Raises:
            TransformError: ``fn`` runs, but cannot be captured.
        """
        key = None if kwargs else _quick_key(self.fn, args)
        captured = self._recent.get(key)
        if captured is not None and not is_capturing():
            return self._replay(captured, args)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        captured = None
        if _is_on_cuda(tensors) and not is_capturing():
            captured = self._find(leaves, spec, tensors)
        if captured is None:
            with torch.no_grad():
                return self.fn(*args, **kwargs)
        if key is not None:
            self._recent[key] = captured
        return self._replay(captured, tensors)

    def without_draws(self, inputs: tuple[Any, ...]) -> Callable[[], Any] | None:
        """Give what replays for these inputs, if no random number is drawn there.

        A loader then need not set generators, which takes longer than the replay.

        Returns:
            None where there is no such graph, or not yet: call the transform itself.
        """
        key = _quick_key(self.fn, inputs)
        tensors: Sequence[Tensor] = inputs
        if key is not None:
            captured = self._recent.get(key)
        else:
            leaves, spec = pytree.tree_flatten((inputs, {}))
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            if not _is_on_cuda(tensors) or _why_not(leaves, tensors):
                return None
            signature = _signature(self.fn, leaves, spec, tensors)
            captured = self._captured.get(signature)
        if captured is None or captured.draws_numbers or is_capturing():
            return None
        return functools.partial(self._replay, captured, tensors)

    def _replay(self, captured: Captured, tensors: Sequence[Tensor]) -> Any:
        with torch.no_grad(), self._lock:
            return replay(captured, tensors)

    def _find(
        self, leaves: list[Any], spec: pytree.TreeSpec, tensors: list[Tensor]
    ) -> Captured | None:
        """The graph for these arguments, captured now if need be; None: there is none.

        It may take long, and other threads wait meanwhile.
        """
        reason = _why_not(leaves, tensors)
        if reason:
            self._warn_once(reason)
            return None
        signature = _signature(self.fn, leaves, spec, tensors)
        captured = self._captured.get(signature)
        if captured is not None:
            return captured
        with self._lock:
            if signature in self._captured:  # Another thread was faster.
                return self._captured[signature]
            if any(_is_shorter(signature, known) for known in self._captured):
                return None
            if len(self._captured) >= self.max_signatures:
                self._warn_once(
                    f"{self.max_signatures} signatures are captured already; raise "
                    "max_signatures, or keep shapes fixed with drop_last=True"
                )
                return None
            captured = self._captured[signature] = capture(self.fn, leaves, spec)
            return captured

    def _warn_once(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            _logger.warning("%r runs some calls without a graph: %s.", self, reason)

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
                "on the host. Pass the augmentation as transform= itself: it fuses. "
                "Where it does not, fuse(augmentation, kept='graphed') draws them for "
                "each batch."
            )


def _is_on_cuda(tensors: list[Tensor]) -> bool:
    return bool(tensors) and all(tensor.is_cuda for tensor in tensors)


def _why_not(leaves: list[Any], tensors: list[Tensor]) -> str:
    """Why these arguments cannot belong to a graph; empty: they can."""
    if any(tensor.device != tensors[0].device for tensor in tensors):
        return "the tensors lie on different devices"
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            if type(leaf) not in (Tensor, nn.Parameter) or leaf.layout != torch.strided:
                return f"a {type(leaf).__name__} with layout {leaf.layout} was passed"
        elif not is_hashable(leaf):
            return f"a {type(leaf).__name__} was passed, which may change unseen"
    return ""


def _signature(
    fn: Callable[..., Any], leaves: list[Any], spec: Any, tensors: list[Tensor]
) -> _Signature:
    kind = (spec, _modes(fn), *map(_describe, leaves))
    return kind, tuple(len(one) if one.ndim else 0 for one in tensors)


def _quick_key(fn: Callable[..., Any], args: tuple[Any, ...]) -> object:
    """The same for plain tensors on CUDA, without walking them; None: others."""
    key = [_modes(fn)]
    for arg in args:
        if type(arg) is not Tensor or not arg.is_cuda or arg.layout != torch.strided:
            return None
        key.append((arg.shape, arg.stride(), arg.dtype, arg.device))
    return tuple(key)


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


def _is_shorter(batch: _Signature, than: _Signature) -> bool:
    (kind, lengths), (other_kind, longer) = batch, than
    is_alike = kind == other_kind and lengths != longer
    return is_alike and all(map(int.__le__, lengths, longer))
