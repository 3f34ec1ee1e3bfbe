"""How is a batch of any structure walked and rebuilt as the same type?

A *batch* is a nested structure. Containers are walked: tuples (named ones and torch's
return types too), lists, deques, mappings, dataclasses and attrs classes. Everything
else is a *leaf*: a tensor, an object with its own ``to()``, a string, ``None``, ...

Invariants: a walk visits the leaves of equal structures in equal order; a container
none of whose leaves changed is returned as it is; a container with a changed leaf is
copied, never written to, and keeps its type and its other attributes.

This file does not know devices, streams or transforms. It is the only one that handles
values of unknown type, hence the only one that uses ``Any``.
"""

import array
import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSequence, Set
from types import MappingProxyType
from typing import Any

import torch

from gpuprefetch.errors import BatchError

__all__ = [
    "Field",
    "Path",
    "field_names",
    "format_path",
    "has_own_to",
    "iter_leaves",
    "map_leaves",
    "replace_item",
]


class Field(str):
    """The name of a field, as a step of a path: written ``.x``, not ``['x']``."""

    __slots__ = ()


# From a container to a child: an index, a key, or a field. Put into words only for
# messages, since every walk of every batch builds paths.
Step = Any
Path = tuple[Step, ...]

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


def format_path(path: Path) -> str:
    """Write a leaf's place as the user would index it: ``batch['target'][1]``."""
    return "batch" + "".join(
        f".{step}" if isinstance(step, Field) else f"[{step!r}]" for step in path
    )


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


def iter_leaves(batch: Any) -> Iterator[tuple[Any, Path]]:
    """Yield each leaf with its path, in the order in which :func:`map_leaves` goes.

    Raises:
        BatchError: The structure contains itself.
    """
    leaves: list[tuple[Any, Path]] = []

    def note(leaf: Any, path: Path) -> Any:
        leaves.append((leaf, path))
        return leaf

    map_leaves(batch, note)
    return iter(leaves)


def map_leaves(batch: Any, change: Callable[[Any, Path], Any], path: Path = ()) -> Any:
    """Rebuild a batch with ``change(leaf, path)`` in the place of every leaf.

    Args:
        batch: Any structure; it is not written to.
        change: Gets each leaf and its path; returns the leaf itself to keep it.
        path: Where ``batch`` stands in a larger structure.

    Returns:
        The same structure and the same types at every level. Containers without a
        changed leaf are the very objects that came in.

    Raises:
        BatchError: A container cannot be rebuilt, or the structure contains itself.
    """
    kind = type(batch)
    if kind in _PLAIN_LEAVES:
        return change(batch, path)
    if len(path) > _MAX_NESTING:
        raise BatchError(
            f"{format_path(path[:4])}... is nested deeper than {_MAX_NESTING} levels. "
            "A batch may not contain itself."
        )
    if kind not in _PLAIN_CONTAINERS and (
        isinstance(batch, torch.Tensor) or has_own_to(batch)
    ):
        return change(batch, path)
    children = _children(batch)
    if children is None:
        return change(batch, path)
    changed: dict[Any, Any] = {}
    for key, step, child in children:
        new = map_leaves(child, change, (*path, step))
        if new is not child:
            changed[key] = new
    return _rebuild(batch, changed, path) if changed else batch


def replace_item(container: Any, item: Any, value: Any) -> Any:
    """Return a copy of ``container`` with one index, key or field replaced."""
    if isinstance(container, tuple):
        item = (
            container._fields.index(item)  # type: ignore[attr-defined]
            if isinstance(item, str)
            else range(len(container))[item]
        )
    return _rebuild(container, {item: value}, ())


# Containers #


def _children(container: Any) -> Iterable[tuple[Any, Step, Any]] | None:
    """List ``(key, step, child)`` of a container; ``None`` says it is a leaf."""
    kind = type(container)
    if kind is tuple or kind is list:
        return [(place, place, child) for place, child in enumerate(container)]
    if isinstance(container, Mapping):
        return [(key, key, child) for key, child in container.items()]
    if isinstance(container, tuple) and getattr(container, "_fields", None):
        named = zip(container._fields, container, strict=False)  # type: ignore[attr-defined]
        return [
            (place, Field(name), child) for place, (name, child) in enumerate(named)
        ]
    if isinstance(container, (tuple, MutableSequence)):
        if isinstance(container, _NUMBER_SEQUENCES):
            return None
        return [(place, place, child) for place, child in enumerate(container)]
    names = field_names(container)
    if names:
        return [(name, Field(name), getattr(container, name)) for name in names]
    if isinstance(container, Set) and any(
        isinstance(member, torch.Tensor) for member in container
    ):
        raise BatchError(
            f"a {type(container).__name__} in the batch holds tensors. Sets compare "
            "tensors by identity and cannot be rebuilt; use a list or a tuple."
        )
    return None


def _rebuild(container: Any, changed: dict[Any, Any], path: Path) -> Any:
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
    except BatchError:
        raise
    except Exception as error:
        raise _cannot_rebuild(container, path, str(error)) from error
    if type(copied) is not type(container) or copied is container:
        raise _cannot_rebuild(container, path, "copy.copy() gave no copy of its type")
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


def _cannot_rebuild(container: Any, path: Path, why: str) -> BatchError:
    return BatchError(
        f"{format_path(path)} is a {type(container).__qualname__} that cannot be "
        f"rebuilt with its tensors moved ({why}). Accepted are types that copy.copy() "
        "copies and whose items can be assigned, named tuples, and objects with a "
        "to(device) method; give the type such a method, or return a dict."
    )
