"""How is a batch of any structure walked and rebuilt as the same type?

A *batch* is a nested structure. Containers are walked: tuples (named ones and torch's
return types too), lists, deques, mappings, dataclasses and attrs classes. Everything
else is a *leaf*: a tensor, an object with its own ``to()``, a string, ``None``, ...

Invariants: a walk visits the leaves of equal structures in equal order; a container
none of whose leaves changed is returned as it is; a container with a changed leaf is
copied, never written to, and keeps its type and its other attributes.

Every batch is walked several times, so a walk keeps no paths: where a message has to
name a leaf, :func:`path_to` looks for it again.

This file does not know devices, streams or transforms. It is the only one that handles
values of unknown type, hence the only one that uses ``Any``.
"""

import array
import copy
import dataclasses
import operator
from collections.abc import Callable, Iterable, Mapping, MutableSequence, Set
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from gpuprefetch.errors import BatchError

__all__ = [
    "field_names",
    "has_own_to",
    "leaves_of",
    "map_leaves",
    "path_to",
    "replace_item",
]

# Deeper nesting than this is taken for a structure that contains itself.
_MAX_NESTING = 200

# Sequences of plain numbers: never walked, since they cannot hold tensors.
_NUMBER_SEQUENCES = (bytearray, array.array, memoryview)

# Types met in nearly every batch that are leaves without any further question.
_PLAIN_LEAVES = frozenset(
    {torch.Tensor, str, int, float, bool, complex, bytes, type(None)}
)

# Containers that need no question about their own methods or fields.
_PLAIN_CONTAINERS = frozenset({tuple, list, dict})


def has_own_to(value: Any) -> bool:
    """Tell whether ``value`` is an object that moves itself: ``value.to(device)``."""
    return not isinstance(value, type) and callable(getattr(value, "to", None))


def field_names(value: Any) -> tuple[str, ...]:
    """Name the fields of a dataclass or attrs instance, with what was added later.

    Returns:
        Declared fields that are set, then further attributes in ``__dict__``; empty for
        every other kind of value.
    """
    if isinstance(value, type):
        return ()
    if dataclasses.is_dataclass(value):
        declared = [field.name for field in dataclasses.fields(value)]
    elif hasattr(type(value), "__attrs_attrs__"):
        declared = [field.name for field in type(value).__attrs_attrs__]
    else:
        return ()
    names = [name for name in declared if hasattr(value, name)]
    return tuple(dict.fromkeys([*names, *getattr(value, "__dict__", {})]))


# Walks #


def leaves_of(batch: Any) -> list[Any]:
    """List the leaves, in the order in which :func:`map_leaves` visits them.

    Raises:
        BatchError: The structure contains itself.
    """
    leaves: list[Any] = []
    _collect(batch, leaves, 0)
    return leaves


def _collect(batch: Any, leaves: list[Any], level: int) -> None:
    kind = type(batch)
    if kind in _PLAIN_LEAVES:
        leaves.append(batch)
    elif kind is tuple or kind is list:
        _check_nesting(level)
        for child in batch:
            _collect(child, leaves, level + 1)
    elif (children := _children(batch)) is None:
        leaves.append(batch)
    else:
        _check_nesting(level)
        for _, _, child in children:
            _collect(child, leaves, level + 1)


def map_leaves(batch: Any, change: Callable[[Any], Any]) -> Any:
    """Rebuild a batch with ``change(leaf)`` in the place of every leaf.

    Args:
        batch: Any structure; it is not written to.
        change: Gets each leaf; returns the leaf itself to keep it.

    Returns:
        The same structure and the same types at every level. Containers without a
        changed leaf are the very objects that came in.

    Raises:
        BatchError: A container cannot be rebuilt, or the structure contains itself.
    """
    try:
        return _map(batch, change, 0)
    except _CannotRebuildError as error:
        kind = type(error.container).__qualname__
        raise BatchError(
            f"{path_to(batch, error.container)} is a {kind} that cannot be rebuilt "
            f"with its tensors moved ({error}). Accepted are types that copy.copy() "
            "copies and whose items can be assigned, named tuples, and objects with a "
            "to(device) method; give the type such a method, or return a dict."
        ) from error.__cause__


def _map(batch: Any, change: Callable[[Any], Any], level: int) -> Any:
    kind = type(batch)
    if kind in _PLAIN_LEAVES:
        return change(batch)
    _check_nesting(level)
    if kind is tuple or kind is list:
        new = [_map(child, change, level + 1) for child in batch]
        is_same = all(map(operator.is_, new, batch))
        return batch if is_same else (tuple(new) if kind is tuple else new)
    children = _children(batch)
    if children is None:
        return change(batch)
    changed: dict[Any, Any] = {}
    for key, _, child in children:
        new_child = _map(child, change, level + 1)
        if new_child is not child:
            changed[key] = new_child
    return _rebuild(batch, changed) if changed else batch


def _check_nesting(level: int) -> None:
    if level > _MAX_NESTING:
        raise BatchError(
            f"the batch is nested deeper than {_MAX_NESTING} levels. A batch may not "
            "contain itself."
        )


def path_to(batch: Any, part: Any) -> str:
    """Write a part's place as the user would index it: ``batch['target'][1]``.

    Args:
        batch: Where to look.
        part: The very leaf or container; the first place found counts.
    """
    return f"batch{_find(batch, part, 0) or ''}"


def _find(batch: Any, part: Any, level: int) -> str | None:
    if batch is part:
        return ""
    for _, step, child in () if level > _MAX_NESTING else _children(batch) or ():
        below = _find(child, part, level + 1)
        if below is not None:
            return step() + below
    return None


def replace_item(container: Any, item: Any, value: Any) -> Any:
    """Return a copy of ``container`` with one index, key or field replaced."""
    if isinstance(container, tuple):
        item = (
            container._fields.index(item)  # type: ignore[attr-defined]
            if isinstance(item, str)
            else range(len(container))[item]
        )
    return _rebuild(container, {item: value})


# Containers #


# Key of a child in its container, how to write the step to it, and the child.
_Child = tuple[Any, Callable[[], str], Any]


class _CannotRebuildError(Exception):
    """A container refused to be copied; becomes a BatchError with its path."""

    def __init__(self, container: Any, why: str) -> None:
        super().__init__(why)
        self.container = container


def _children(value: Any) -> Iterable[_Child] | None:
    """List the children of a container; ``None`` says that the value is a leaf."""
    kind = type(value)
    if kind in _PLAIN_LEAVES:
        return None
    if kind not in _PLAIN_CONTAINERS and (
        isinstance(value, torch.Tensor) or has_own_to(value)
    ):
        return None
    if isinstance(value, Mapping):
        return [(key, partial("[{!r}]".format, key), value[key]) for key in value]
    if isinstance(value, tuple) and getattr(value, "_fields", None):
        names = enumerate(value._fields)  # type: ignore[attr-defined]
        return [(i, partial(".{}".format, name), value[i]) for i, name in names]
    if isinstance(value, _NUMBER_SEQUENCES):
        return None
    if isinstance(value, (tuple, MutableSequence)):
        places = enumerate(value)
        return [(i, partial("[{}]".format, i), child) for i, child in places]
    if isinstance(value, Set):
        _refuse_tensors(value)
        return None
    names_of = field_names(value)
    if names_of:
        return [
            (name, partial(".{}".format, name), getattr(value, name))
            for name in names_of
        ]
    return None


def _refuse_tensors(members: Set[Any]) -> None:
    if any(isinstance(member, torch.Tensor) for member in members):
        raise BatchError(
            f"a {type(members).__name__} in the batch holds tensors. Sets compare "
            "tensors by identity and cannot be rebuilt; use a list or a tuple."
        )


def _rebuild(container: Any, changed: dict[Any, Any]) -> Any:
    """Copy a container with some children replaced, keeping its exact type."""
    try:
        if isinstance(container, tuple):
            return _rebuild_tuple(container, changed)
        if isinstance(container, MappingProxyType):
            return MappingProxyType({**container, **changed})
        copied = copy.copy(container)
        if isinstance(container, (Mapping, MutableSequence)):
            for key, child in changed.items():
                copied[key] = child
        else:
            for name, child in changed.items():
                _set_field(copied, name, child)
    except Exception as error:
        raise _CannotRebuildError(container, str(error)) from error
    if type(copied) is not type(container) or copied is container:
        raise _CannotRebuildError(container, "copy.copy() gave no copy of its type")
    return copied


def _set_field(container: Any, name: str, value: Any) -> None:
    try:
        setattr(container, name, value)
    except AttributeError:
        # A frozen dataclass refuses plain assignment, also to this fresh copy.
        object.__setattr__(container, name, value)


def _rebuild_tuple(container: tuple[Any, ...], changed: dict[int, Any]) -> Any:
    """Rebuild a tuple, a named tuple, a torch return type or a subclass of tuple."""
    items = [changed.get(place, child) for place, child in enumerate(container)]
    kind = type(container)
    if kind is tuple:
        return tuple(items)
    make = getattr(kind, "_make", None)
    rebuilt = make(items) if callable(make) else kind(items)
    if hasattr(container, "__dict__"):
        rebuilt.__dict__.update(vars(container))
    return rebuilt
