"""How is a batch of any structure walked, and its leaves replaced?

A *batch* is a nested structure. What ``containers`` knows as a container is walked;
everything else is a *leaf*: a tensor, an object with its own ``to()``, a string,
``None``, ...

Invariants: a walk visits the leaves of equal structures in equal order; a container
none of whose leaves changed is returned as it is; a container with a changed leaf is
copied, never written to, and keeps its type and its other attributes.

Every batch is walked several times, so a walk keeps no paths: where a message has to
name a leaf, :func:`path_to` looks for it again.

This file does not know devices, streams or transforms.
"""

import operator
from collections.abc import Callable
from typing import Any

from gpuprefetch.containers import (
    PLAIN_LEAVES,
    CannotRebuildError,
    children_of,
    rebuild,
)
from gpuprefetch.errors import BatchError

__all__ = ["leaves_of", "map_leaves", "path_to"]

# Deeper nesting than this is taken for a structure that contains itself.
_MAX_NESTING = 200


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
    if kind in PLAIN_LEAVES:
        leaves.append(batch)
    elif level > _MAX_NESTING:
        raise _too_deep()
    elif kind is tuple or kind is list:
        for child in batch:
            if type(child) in PLAIN_LEAVES:  # Nearly every one; a call saved.
                leaves.append(child)
            else:
                _collect(child, leaves, level + 1)
    elif (children := children_of(batch)) is None:
        leaves.append(batch)
    else:
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
    except CannotRebuildError as error:
        kind = type(error.container).__qualname__
        raise BatchError(
            f"{path_to(batch, error.container)} is a {kind} that cannot be rebuilt "
            f"with its tensors moved ({error}). Accepted are types that copy.copy() "
            "copies and whose items can be assigned, named tuples, and objects with a "
            "to(device) method; give the type such a method, or return a dict."
        ) from error.__cause__


def _map(batch: Any, change: Callable[[Any], Any], level: int) -> Any:
    kind = type(batch)
    if kind in PLAIN_LEAVES:
        return change(batch)
    if level > _MAX_NESTING:
        raise _too_deep()
    if kind is tuple or kind is list:
        new = [
            change(child)
            if type(child) in PLAIN_LEAVES  # Nearly every one; a call saved.
            else _map(child, change, level + 1)
            for child in batch
        ]
        is_same = all(map(operator.is_, new, batch))
        return batch if is_same else (tuple(new) if kind is tuple else new)
    children = children_of(batch)
    if children is None:
        return change(batch)
    changed: dict[Any, Any] = {}
    for key, _, child in children:
        new_child = _map(child, change, level + 1)
        if new_child is not child:
            changed[key] = new_child
    return rebuild(batch, changed) if changed else batch


def _too_deep() -> BatchError:
    return BatchError(
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
    if level > _MAX_NESTING:
        return None
    for _, step, child in children_of(batch) or ():
        below = _find(child, part, level + 1)
        if below is not None:
            return step() + below
    return None
