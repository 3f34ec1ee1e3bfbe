"""How does one leaf get to the device?

Tensors move with ``Tensor.to``; objects that move themselves are asked to; everything
else stays. The rule for objects: ``to(device, non_blocking=True)`` when the signature
takes it, ``to(device)`` otherwise. What ``to`` raises is passed on.

This file does not know streams or slots.
"""

import inspect
import sys
import warnings
from typing import Any, cast

import torch

from gpuprefetch.batch import leaves_of, path_to
from gpuprefetch.containers import has_own_to
from gpuprefetch.errors import BatchWarning, TransformError

__all__ = [
    "check_on_device",
    "is_plain_dense",
    "move_leaf",
    "num_bytes_of",
    "wrap_like",
]

# Per class: whether its `to` takes `non_blocking`. Reading a signature takes 20 us.
_takes_non_blocking: dict[type, bool] = {}

# Classes that a BatchWarning has named already.
_warned: set[type] = set()


def move_leaf(
    leaf: Any, *, batch: Any, device: torch.device, non_blocking: bool
) -> Any:
    """Move one leaf, or return it as it is when there is nothing to move.

    Args:
        leaf: Anything found in a batch.
        batch: Where it was found, for messages.
        device: With an index, as tensors report it.
        non_blocking: Let copies from pinned memory run on after the call.
    """
    if isinstance(leaf, torch.Tensor):
        if leaf.device == device:
            return leaf
        return leaf.to(device, non_blocking=non_blocking)
    if has_own_to(leaf):
        if non_blocking and _accepts_non_blocking(leaf):
            return leaf.to(device, non_blocking=True)
        return leaf.to(device)
    if type(leaf) not in _warned and hasattr(leaf, "__dict__"):
        _warn_of_hidden_tensors(leaf, batch)
    return leaf


def _accepts_non_blocking(leaf: Any) -> bool:
    kind = type(leaf)
    if kind not in _takes_non_blocking:
        try:
            parameters = inspect.signature(leaf.to).parameters
            _takes_non_blocking[kind] = "non_blocking" in parameters or any(
                parameter.kind is parameter.VAR_KEYWORD
                for parameter in parameters.values()
            )
        except (TypeError, ValueError):
            _takes_non_blocking[kind] = False
    return _takes_non_blocking[kind]


def _warn_of_hidden_tensors(leaf: Any, batch: Any) -> None:
    kind = type(leaf)
    if isinstance(leaf, type):
        return
    for name, value in vars(leaf).items():
        if isinstance(value, torch.Tensor):
            _warned.add(kind)
            warnings.warn(
                f"{path_to(batch, leaf)} is a {kind.__qualname__} whose tensor "
                f"{name!r} stays on {value.device}: the class has no to(device) "
                "method. Give it one, or make it a dataclass, and it will be moved. "
                "warnings.filterwarnings('ignore', category=BatchWarning) silences "
                "this.",
                BatchWarning,
                stacklevel=2,
            )
            return


def num_bytes_of(leaf: Any) -> int:
    """Count the bytes of a dense tensor; anything else counts as 0."""
    is_dense = isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
    return leaf.nbytes if is_dense else 0


def is_plain_dense(leaf: Any) -> bool:
    """Tell whether a leaf is a dense CPU tensor whose bytes can be copied as such.

    True for torch.Tensor, torch.nn.Parameter and torchvision's tv_tensors; false for
    sparse, nested and quantized tensors and for other subclasses.
    """
    return (
        isinstance(leaf, torch.Tensor)
        and (type(leaf) in (torch.Tensor, torch.nn.Parameter) or _is_tv_tensor(leaf))
        and leaf.device.type == "cpu"
        and leaf.layout is torch.strided
        and not leaf.is_quantized
        and not leaf.is_nested
    )


def wrap_like(tensor: torch.Tensor, like: torch.Tensor | None) -> torch.Tensor:
    """Give a moved tensor the class and metadata of the leaf that it came from."""
    if like is None or not _is_tv_tensor(like):
        return tensor
    tv_tensors = sys.modules["torchvision.tv_tensors"]
    return cast(torch.Tensor, tv_tensors.wrap(tensor, like=like))


def _is_tv_tensor(leaf: torch.Tensor) -> bool:
    # A leaf of that class can exist only if its module has been imported.
    tv_tensors = sys.modules.get("torchvision.tv_tensors")
    return tv_tensors is not None and isinstance(leaf, tv_tensors.TVTensor)


def check_on_device(result: Any, batch: Any, device: torch.device) -> None:
    """Refuse a transform's result that left the device.

    Args:
        result: What the transform returned.
        batch: That in its place.
        device: Where it must be.

    Raises:
        TransformError: Names the first tensor that lies elsewhere, by its path.
    """
    for leaf in leaves_of(result):
        if isinstance(leaf, torch.Tensor) and leaf.device != device:
            raise TransformError(
                f"after the transform, {path_to(batch, leaf)} is on {leaf.device}, not "
                f"on {device}. A transform gets its inputs on {device} and must return "
                "its results there; return tensor.to(inputs.device) instead."
            )
