"""Is a yielded batch what the plain loop ``batch.to(device)`` would have given?

One walk over both structures: the same type at every level, the same keys in the same
order, and every tensor equal to ``source.to(device)`` in type, dtype, shape, layout,
device, bits, and, where it is dense, strides. Written without the package, so that it
can judge it.
"""

import dataclasses
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

__all__ = ["assert_moved", "bits", "dense_parts", "tensor_leaves"]


def assert_moved(
    actual: Any, source: Any, device: torch.device, path: str = "batch"
) -> None:
    """Assert that ``actual`` is ``source`` with its tensors on ``device``.

    Raises:
        AssertionError: They differ; the message names the place.
    """
    assert type(actual) is type(source), (
        f"{path}: {type(actual).__name__} for {type(source).__name__}"
    )
    if isinstance(source, torch.Tensor):
        _assert_tensor(actual, source.detach().to(device), path)
    elif isinstance(source, np.ndarray):
        assert actual.dtype == source.dtype, path
        np.testing.assert_array_equal(actual, source, err_msg=path)
    elif isinstance(source, PackedSequence):
        # Its lengths stay on the CPU, where torch's packed kernels want them.
        _assert_tensor(actual.data, source.data.to(device), f"{path}.data")
        _assert_tensor(actual.batch_sizes, source.batch_sizes, f"{path}.batch_sizes")
    elif isinstance(source, (Mapping, Sequence, deque)) and not isinstance(
        source, (str, bytes)
    ):
        _assert_container(actual, source, device, path)
    elif _names(source):
        _assert_fields(actual, source, device, path)
    else:
        assert actual is source or repr(actual) == repr(source), (
            f"{path}: {actual!r} for {source!r}"
        )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Give a dense tensor's bytes in logical order, on the CPU."""
    plain = tensor.detach().as_subclass(torch.Tensor)
    plain = plain.cpu().resolve_conj().resolve_neg()
    plain = plain.clone(memory_format=torch.contiguous_format)
    if plain.numel() == 0:
        return torch.empty(0, dtype=torch.uint8)
    return plain.reshape(-1).view(torch.uint8)


def tensor_leaves(value: Any) -> list[torch.Tensor]:
    """List the tensors of a structure, by a walk of its own."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, PackedSequence):
        return [part for part in value if part is not None]
    if isinstance(value, Mapping):
        return [leaf for child in value.values() for leaf in tensor_leaves(child)]
    if isinstance(value, (Sequence, deque)) and not isinstance(value, (str, bytes)):
        return [leaf for child in value for leaf in tensor_leaves(child)]
    return [
        leaf for name in _names(value) for leaf in tensor_leaves(getattr(value, name))
    ]


def _assert_tensor(actual: torch.Tensor, expected: torch.Tensor, path: str) -> None:
    for name in ("dtype", "device", "layout", "is_nested"):
        came, wanted = getattr(actual, name), getattr(expected, name)
        if (
            name == "device"
            and came.type == wanted.type
            and None
            in (
                came.index,
                wanted.index,
            )
        ):
            continue
        assert came == wanted, f"{path}.{name}: {came} for {wanted}"
    for name in ("format", "canvas_size"):
        if hasattr(expected, name):
            assert getattr(actual, name) == getattr(expected, name), f"{path}.{name}"
    if expected.is_nested and expected.device.type == "meta":
        # Without values it has no rows to look at.
        return
    if expected.is_nested:
        assert len(actual.unbind()) == len(expected.unbind()), path
        for row, (came, wanted) in enumerate(
            zip(actual.unbind(), expected.unbind(), strict=True)
        ):
            _assert_tensor(came, wanted, f"{path}[{row}]")
        return
    assert actual.shape == expected.shape, f"{path}: {actual.shape} {expected.shape}"
    for came, wanted in zip(dense_parts(actual), dense_parts(expected), strict=True):
        assert came.shape == wanted.shape, f"{path}: {came.shape} {wanted.shape}"
        if _is_dense(wanted):
            assert came.stride() == wanted.stride(), (
                f"{path}: strides {came.stride()} for {wanted.stride()}"
            )
        if wanted.device.type != "meta":
            assert torch.equal(bits(came), bits(wanted)), f"{path}: {came} {wanted}"


def dense_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Split a tensor into the strided ones that hold its data."""
    if tensor.layout == torch.jagged:
        return [tensor.values(), tensor.offsets()]
    if tensor.layout == torch.strided:
        return [tensor]
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]


def _is_dense(tensor: torch.Tensor) -> bool:
    """Tell whether the elements fill their memory without overlap or gap."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _assert_container(
    actual: Any, source: Any, device: torch.device, path: str
) -> None:
    assert len(actual) == len(source), f"{path}: {len(actual)} for {len(source)} items"
    if isinstance(source, Mapping):
        assert list(actual) == list(source), f"{path}: keys {list(actual)}"
        places = list(source)
    else:
        places = list(range(len(source)))
    for place in places:
        assert_moved(actual[place], source[place], device, f"{path}[{place!r}]")
    if isinstance(source, defaultdict):
        assert actual.default_factory is source.default_factory, path
    if isinstance(source, deque):
        assert actual.maxlen == source.maxlen, path
    for name, value in getattr(source, "__dict__", {}).items():
        if name != "data":  # Where UserDict and UserList keep what was compared above.
            assert_moved(getattr(actual, name), value, device, f"{path}.{name}")


def _names(value: Any) -> list[str]:
    """Name the fields of a dataclass, an attrs class or an object that moves itself."""
    if isinstance(value, type):
        return []
    if dataclasses.is_dataclass(value):
        declared = [field.name for field in dataclasses.fields(value)]
    elif hasattr(type(value), "__attrs_attrs__"):
        declared = [field.name for field in type(value).__attrs_attrs__]
    elif callable(getattr(value, "to", None)):
        declared = list(vars(value))
    else:
        return []
    return [name for name in declared if hasattr(value, name)]


def _assert_fields(actual: Any, source: Any, device: torch.device, path: str) -> None:
    assert _names(actual) == _names(source), f"{path}: fields {_names(actual)}"
    for name in _names(source):
        assert_moved(
            getattr(actual, name), getattr(source, name), device, f"{path}.{name}"
        )
