"""Which part of a batch does the transform get, and where does its result go?

``inputs`` names it: an index, a key, a field, or a tuple of those. ``None`` means a
bare tensor itself, or item 0 of a tuple or list. What is not named is left alone.
"""

from collections.abc import Mapping, MutableSequence, Sequence
from itertools import islice
from typing import Any

import torch

from gpuprefetch.containers import CannotRebuildError, field_names, replace_item
from gpuprefetch.errors import BatchError, SelectionError, TransformError
from gpuprefetch.plural import counted

__all__ = ["Selection"]

# What nearly every batch is: told sooner than all other kinds can be.
_USUAL_KINDS = (tuple, list)

# Items of a batch that a message lists.
_MOST_LISTED = 10


class Selection:
    """The parts of a batch that go through the transform.

    Args:
        inputs: What the user gave: ``None``, an index, a key or field name, or a tuple
            of those. A tuple makes the transform take and return that many values.
    """

    def __init__(self, inputs: object) -> None:
        self._inputs = inputs
        self._is_many = isinstance(inputs, tuple)

    def take(self, batch: Any) -> tuple[Any, ...]:
        """Pick the transform's arguments.

        Raises:
            SelectionError: The batch has no such item; the message lists what it has.
        """
        if self._inputs is None and type(batch) in _USUAL_KINDS and batch:
            return (batch[0],)
        return tuple(_get(batch, item) for item in self._items(batch))

    def put(self, batch: Any, result: Any) -> Any:
        """Return a copy of the batch with the transform's result in place.

        Raises:
            TransformError: ``inputs`` is a tuple and the number of results differs.
            BatchError: The batch is of a type that cannot be rebuilt.
        """
        if self._inputs is None and type(batch) in _USUAL_KINDS and batch:
            if batch[0] is result:
                return batch
            rest = batch[1:]
            return (result, *rest) if type(batch) is tuple else [result, *rest]
        if self._inputs is None and isinstance(batch, torch.Tensor):
            return result
        items = self._items(batch)
        results = self._split(result) if self._is_many else (result,)
        for item, value in zip(items, results, strict=True):
            if _get(batch, item) is not value:
                batch = self._replace(batch, item, value)
        return batch

    def _replace(self, batch: Any, item: Any, value: Any) -> Any:
        try:
            return replace_item(batch, item, value)
        except CannotRebuildError as error:
            raise BatchError(
                f"the transform's result cannot take the place of {item!r} in a "
                f"{_describe(batch)} ({error}). Use a type whose items can be "
                "assigned, or batch_transform=..."
            ) from error.__cause__

    def _items(self, batch: Any) -> tuple[Any, ...]:
        if isinstance(self._inputs, tuple):
            return self._inputs
        if self._inputs is not None:
            return (self._inputs,)
        if isinstance(batch, torch.Tensor):
            return (_WHOLE,)
        if isinstance(batch, (tuple, MutableSequence)) and len(batch) > 0:
            return (0,)
        raise SelectionError(
            f"cannot tell which part of a {_describe(batch)} is the transform's input. "
            "Pass inputs=... (a key, an index, a field, or a tuple of them), or "
            "batch_transform=... for a function of the whole batch."
        )

    def _split(self, result: Any) -> tuple[Any, ...]:
        expected = len(self._inputs)  # type: ignore[arg-type]
        if expected == 1 and not isinstance(result, (tuple, list)):
            return (result,)
        if not isinstance(result, (tuple, list)) or len(result) != expected:
            came = (
                counted(len(result), "value")
                if isinstance(result, (tuple, list))
                else f"one {type(result).__name__}"
            )
            raise TransformError(
                f"inputs={self._inputs!r} makes the transform take and return "
                f"{counted(expected, 'value')}, but it returned {came}. Return a tuple "
                f"of {expected}, in the order of inputs."
            )
        return tuple(result)


class _Whole:
    """Stands for the batch itself, when it is a bare tensor."""


_WHOLE = _Whole()


def _get(batch: Any, item: Any) -> Any:
    if item is _WHOLE:
        return batch
    if isinstance(batch, Mapping):
        # Asked first, since a defaultdict would invent what it does not have.
        if item in batch:
            return batch[item]
    elif isinstance(item, str):
        if _has_field(batch, item):
            return getattr(batch, item)
    elif isinstance(batch, (tuple, MutableSequence)) and _fits(item, len(batch)):
        return batch[item]
    raise SelectionError(
        f"inputs names {item!r}, which a {_describe(batch)} does not have. Name what "
        "it has, or pass batch_transform=... for a function of the whole batch."
    )


def _has_field(batch: Any, name: str) -> bool:
    """Tell whether ``batch.name`` can be read, and replaced in a copy."""
    if isinstance(batch, tuple):
        # Names of torch's return types can be read only.
        return name in getattr(batch, "_fields", getattr(batch, "__dict__", ()))
    return not isinstance(batch, torch.Tensor) and hasattr(batch, name)


def _fits(place: Any, length: int) -> bool:
    return isinstance(place, int) and -length <= place < length


def _describe(batch: Any) -> str:
    """Name a batch's type and what can be picked from it."""
    name = type(batch).__qualname__
    if isinstance(batch, Mapping):
        return f"{name} with the keys {list(batch)}"
    fields = getattr(batch, "_fields", None) or field_names(batch)
    if fields:
        return f"{name} with the fields {list(fields)}"
    if isinstance(batch, (tuple, MutableSequence)):
        return f"{name} of {counted(len(batch), 'item')}{_list_items(batch)}"
    return name


def _list_items(batch: Sequence[Any]) -> str:
    """Write `` (0: Tensor, 1: int)``, or nothing of a batch without items."""
    # A deque has no slices.
    first = enumerate(islice(batch, _MOST_LISTED))
    shown = [f"{place}: {type(item).__qualname__}" for place, item in first]
    more = ["..."] if len(batch) > len(shown) else []
    return f" ({', '.join(shown + more)})" if shown else ""
