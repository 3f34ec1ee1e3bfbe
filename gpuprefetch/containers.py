"""What are the parts of a container, and how is it rebuilt as the same type?

Containers are tuples (named ones and torch's return types too), lists, deques,
mappings, dataclasses and attrs classes. A copy with changed parts never writes to the
original, does not run the class's constructor where it can do without, and keeps
attributes beside the items.

This file does not know what the parts are for.
"""

import array
import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, MutableSequence, Set
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from gpuprefetch.errors import BatchError

__all__ = [
    "CannotRebuildError",
    "children_of",
    "field_names",
    "has_own_to",
    "rebuild",
    "replace_item",
    "tensors_within",
]

# Sequences of plain numbers: never walked, since they cannot hold tensors.
_NUMBER_SEQUENCES = (bytearray, array.array, memoryview)

# Types met in nearly every batch that are leaves without any further question.
PLAIN_LEAVES = frozenset(
    {torch.Tensor, str, int, float, bool, complex, bytes, type(None)}
)

# Containers that need no question about their own methods or fields.
_PLAIN_CONTAINERS = frozenset({tuple, list, dict})


def has_own_to(value: Any) -> bool:
    """Tell whether ``value`` is an object that moves itself: ``value.to(device)``."""
    try:
        return not isinstance(value, type) and callable(getattr(value, "to", None))
    except Exception:
        # A dict whose attributes are its keys often raises KeyError for one.
        return False


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


# Key of a child in its container, how to write the step to it, and the child.
_Child = tuple[Any, Callable[[], str], Any]


class CannotRebuildError(Exception):
    """A container refused to be copied; becomes a BatchError with its path."""

    def __init__(self, container: Any, why: str) -> None:
        super().__init__(why)
        self.container = container


def children_of(value: Any) -> Iterable[_Child] | None:
    """List the children of a container; ``None`` says that the value is a leaf."""
    kind = type(value)
    if kind in PLAIN_LEAVES:
        return None
    if kind not in _PLAIN_CONTAINERS and (
        isinstance(value, torch.Tensor) or has_own_to(value)
    ):
        return None
    items: list[_Child]
    if isinstance(value, Mapping):
        items = [(key, partial("[{!r}]".format, key), value[key]) for key in value]
    elif isinstance(value, tuple) and getattr(value, "_fields", None):
        names = enumerate(value._fields)  # type: ignore[attr-defined]
        items = [(i, partial(".{}".format, name), value[i]) for i, name in names]
    elif isinstance(value, _NUMBER_SEQUENCES):
        return None
    elif isinstance(value, (tuple, MutableSequence)):
        places = enumerate(value)
        items = [(i, partial("[{}]".format, i), child) for i, child in places]
    elif isinstance(value, Set):
        _refuse_tensors(value)
        return None
    else:
        return _attributes(value, field_names(value)) or None
    if kind in _PLAIN_CONTAINERS or _is_its_own_dict(value):
        return items
    if isinstance(value, (tuple, list, dict)):
        # What a subclass of a built-in container keeps beside its items. Others may
        # keep the items themselves there.
        items += _attributes(value, getattr(value, "__dict__", ()))
    return items


def _is_its_own_dict(value: Any) -> bool:
    """Whether a dict's items are its attributes: ``self.__dict__ = self``."""
    return getattr(value, "__dict__", None) is value


@dataclasses.dataclass(frozen=True, slots=True)
class _Attribute:
    """The key of a child that is an attribute, not an item, of its container."""

    name: str


def _attributes(value: Any, names: Iterable[str]) -> list[_Child]:
    return [
        (_Attribute(name), partial(".{}".format, name), getattr(value, name))
        for name in names
    ]


def _refuse_tensors(members: Set[Any]) -> None:
    if any(isinstance(member, torch.Tensor) for member in members):
        raise BatchError(
            f"a {type(members).__name__} in the batch holds tensors. Sets compare "
            "tensors by identity and cannot be rebuilt; use a list or a tuple."
        )


def rebuild(container: Any, changed: dict[Any, Any]) -> Any:
    """Copy a container with some children replaced, keeping its exact type."""
    try:
        if isinstance(container, tuple):
            return _rebuild_tuple(container, changed)
        if isinstance(container, MappingProxyType):
            return MappingProxyType({**container, **changed})
        copied = _shallow_copy(container)
        for key, child in changed.items():
            if isinstance(key, _Attribute):
                _set_field(copied, key.name, child)
            else:
                _set_item(copied, key, child)
    except Exception as error:
        raise CannotRebuildError(container, str(error)) from error
    if type(copied) is not type(container) or copied is container:
        raise CannotRebuildError(container, "copy.copy() gave no copy of its type")
    return copied


def _shallow_copy(container: Any) -> Any:
    """Copy a container so that setting its items leaves the original alone."""
    copied = copy.copy(container)
    if _is_its_own_dict(container):
        # Made without its constructor, it has the items of before as its attributes.
        object.__setattr__(copied, "__dict__", copied)
    elif isinstance(container, (Mapping, MutableSequence)):
        # Items of a class that is no built-in container lie in an attribute of it,
        # which copy.copy shares between the two.
        for name, value in getattr(copied, "__dict__", {}).items():
            if isinstance(value, (dict, list)):
                _set_field(copied, name, copy.copy(value))
    return copied


def _set_field(container: Any, name: str, value: Any) -> None:
    try:
        # Past a frozen class's refusal and a validator's opinion of what stands for a
        # leaf: this is a fresh copy, and nobody's yet.
        object.__setattr__(container, name, value)
    except (AttributeError, TypeError):
        setattr(container, name, value)


def _set_item(container: Any, key: Any, value: Any) -> None:
    if isinstance(container, dict):
        dict.__setitem__(container, key, value)
    elif isinstance(container, list):
        list.__setitem__(container, key, value)
    else:
        container[key] = value


def _rebuild_tuple(container: tuple[Any, ...], changed: dict[Any, Any]) -> Any:
    """Rebuild a tuple, a named tuple, a torch return type or a subclass of tuple."""
    items = [changed.get(place, child) for place, child in enumerate(container)]
    kind = type(container)
    try:
        # Past the class's own constructor, which may take the items one by one.
        rebuilt: Any = tuple.__new__(kind, items)
    except TypeError:
        # torch's return types are made by their own constructor only.
        rebuilt = kind(items)
    for name, value in getattr(container, "__dict__", {}).items():
        _set_field(rebuilt, name, changed.get(_Attribute(name), value))
    return rebuilt


def replace_item(container: Any, item: Any, value: Any) -> Any:
    """Return a copy of ``container`` with one index, key or field replaced."""
    if isinstance(container, tuple):
        names = getattr(container, "_fields", ())
        if isinstance(item, str) and item not in names:
            # An attribute that a subclass keeps beside its items.
            return rebuild(container, {_Attribute(item): value})
        item = (
            names.index(item) if isinstance(item, str) else range(len(container))[item]
        )
    is_item = isinstance(container, (tuple, Mapping, MutableSequence))
    return rebuild(container, {item if is_item else _Attribute(item): value})


def tensors_within(leaf: Any) -> list[torch.Tensor]:
    """List the tensors that an object with its own ``to`` holds.

    Looked at are its items and attributes, and in turn those of containers and of
    objects that move themselves; not those of anything else it refers to, such as a
    data set.
    """
    tensors: list[torch.Tensor] = []
    seen: set[int] = set()
    waiting = [leaf]
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif type(value) not in PLAIN_LEAVES and id(value) not in seen:
            seen.add(id(value))
            waiting += _parts_of(value)
    return tensors


def _parts_of(value: Any) -> list[Any]:
    parts: list[Any] = []
    if isinstance(value, Mapping):
        parts += value.values()
    elif isinstance(value, (tuple, MutableSequence, Set)) and not isinstance(
        value, _NUMBER_SEQUENCES
    ):
        parts += value
    names = {*field_names(value)}
    if has_own_to(value) or parts:
        names.update(getattr(value, "__dict__", ()))
        for kind in type(value).__mro__:
            slots = kind.__dict__.get("__slots__", ())
            names.update((slots,) if isinstance(slots, str) else slots)
    return parts + [getattr(value, name) for name in names if hasattr(value, name)]
