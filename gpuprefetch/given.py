"""What had a transform been given when it failed?

A note on its error says so: which batch, and what kinds of tensors. Made only after a
failure; nothing here is asked while all goes well.
"""

import re
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import torch

from gpuprefetch.batch import leaves_of, path_to
from gpuprefetch.foreign import why_not_taken_over
from gpuprefetch.kinds import is_array
from gpuprefetch.plural import counted
from gpuprefetch.shapes import looks_channels_last
from gpuprefetch.signatures import arity_of

__all__ = ["note_what_was_given"]

# Leaves that a note lists.
_MOST_LISTED = 10

# Leaves whose places are looked for.
_MOST_PLACED = 256

# Items of a list that are told one by one, even if they are alike.
_MOST_ALIKE = 3

# How torch names uint8, and what it asks for instead.
_IS_OF_TYPE = re.compile(r"uint8|unsigned char|\bbyte\b|\bfloat", re.IGNORECASE)

# The place of an item in its list.
_INDEX = re.compile(r"\[\d+\]: $")


def note_what_was_given(
    error: Exception, inputs: tuple[Any, ...], batch_index: int, function: object
) -> None:
    """Add to an error which batch it is about, and what the transform got of it.

    Args:
        error: What the transform raised.
        inputs: Its arguments.
        batch_index: Number of the batch in its pass.
        function: The transform.
    """
    try:
        given = ", ".join(_describe_all(inputs))
        hints = dict.fromkeys(
            hint for leaf in leaves_of(inputs) for hint in _hints(leaf, str(error))
        )
        hints |= dict.fromkeys((_hint_at_number(function, len(inputs)),))
        reason = why_not_taken_over(function)
        if not reason and callable(
            function
        ):  # Not a Kornia module that was taken over.
            reason = _hint_at_scale(inputs, str(error))
        hints |= dict.fromkeys((reason,))
        said = (
            f"gpuprefetch: in batch {batch_index} of the pass, counted from 0, the "
            f"transform was given {given}."
        )
        error.add_note(" ".join(filter(None, (said, *hints))))
    except Exception:
        # Objects of the user's may fail at anything; their first error is what counts.
        return


def _describe_all(inputs: tuple[Any, ...]) -> list[str]:
    """Describe the first leaves of the arguments, in order, and count the others."""
    leaves = [
        (number, leaf)
        for number, value in enumerate(inputs)
        for leaf in leaves_of(value)
    ]
    # No more than these: to find the place of one takes a walk of its own.
    placed = [
        (_place(inputs, number, leaf), leaf) for number, leaf in leaves[:_MOST_PLACED]
    ]
    runs = [list(run) for _, run in groupby(placed, key=lambda it: _kind_of(*it))]
    described = [text for run in runs for text in _describe_run(run)]
    more = len(described[_MOST_LISTED:]) + len(leaves[_MOST_PLACED:])
    return described[:_MOST_LISTED] + [f"and {more} more"] * (more > 0)


def _kind_of(place: str, leaf: Any) -> tuple[str, str]:
    """Give what the items of a list have in common, with their list."""
    return _INDEX.sub("", place), _describe(leaf, with_shape=False)


def _describe_run(run: list[tuple[str, Any]]) -> list[str]:
    """Describe items of one list: each of a few, the first of many."""
    told = [f"{place}{_describe(leaf)}" for place, leaf in run]
    if len(run) <= _MOST_ALIKE:
        return told
    is_uniform = len({_describe(leaf) for _, leaf in run}) == 1
    others = "" if is_uniform else ", of other shapes"
    return [told[0], f"and {len(run) - 1} more like it{others}"]


def _place(inputs: tuple[Any, ...], number: int, leaf: Any) -> str:
    """Name a leaf among several: ``[1]['box']: ``; nothing where it is the only one."""
    if len(inputs) == 1 and inputs[0] is leaf:
        return ""
    path = path_to(inputs[number], leaf).removeprefix("batch")
    argument = f"argument {number}" if len(inputs) > 1 else "argument"
    return f"{argument}{path}: "


def _describe(leaf: Any, *, with_shape: bool = True) -> str:
    name = type(leaf).__qualname__
    if not isinstance(leaf, torch.Tensor) and not is_array(leaf):
        return name
    shape = f" {tuple(leaf.shape)}" if with_shape else ""
    place = "in host memory" if is_array(leaf) else f"on {leaf.device}"
    return f"{name}{shape} {leaf.dtype} {place}"


def _hint_at_number(function: Any, given: int) -> str:
    """Say which inputs would give a function as many values as it takes."""
    # A module's own takes anything.
    arity = arity_of(getattr(function, "forward", function))
    if arity is None or arity.least <= given <= arity.most:
        return ""
    number = arity.least if given < arity.least else int(arity.most)
    if not number:
        return ""
    inputs = 0 if number == 1 else tuple(range(number))
    return (
        f"The function takes {counted(number, 'value')} and was given {given}. As "
        f"transform=, it gets {number} with inputs={inputs}, or with as many keys or "
        "fields."
    )


def _hint_at_scale(inputs: tuple[Any, ...], message: str) -> str:
    """Say that whole numbers come as they are, where an error is about their type."""
    is_uint8 = any(getattr(x, "dtype", None) is torch.uint8 for x in leaves_of(inputs))
    if not is_uint8 or not _IS_OF_TYPE.search(message):
        return ""
    return (
        "A function gets images as they came: uint8 is scaled for a Kornia "
        "augmentation that is the transform, and for nothing else. Scale it there, "
        "with images.float() / 255."
    )


def _hints(leaf: Any, message: str) -> Iterator[str]:
    if is_array(leaf) and "from_numpy" not in message:
        yield (
            "A NumPy array stays one: turn it into a tensor in the collate function, "
            "with torch.from_numpy."
        )
    if isinstance(leaf, torch.Tensor) and looks_channels_last(tuple(leaf.shape)):
        yield (
            f"{tuple(leaf.shape)} looks like (B, H, W, C). What takes images as (B, C, "
            "H, W), as Kornia does, needs images.permute(0, 3, 1, 2)."
        )
