"""What had a transform been given when it failed?

A note on its error says so: which batch, and what kinds of tensors. Made only after a
failure; nothing here is asked while all goes well.
"""

from collections.abc import Iterator
from typing import Any

import torch

from gpuprefetch.batch import leaves_of, path_to
from gpuprefetch.foreign import why_not_taken_over
from gpuprefetch.kinds import is_array
from gpuprefetch.shapes import looks_channels_last

__all__ = ["note_what_was_given"]

# Leaves that a note lists.
_MOST_LISTED = 10


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
        reason = why_not_taken_over(function)
    except Exception:
        # Objects of the user's may fail at anything; their first error is what counts.
        return
    said = (
        f"gpuprefetch: in batch {batch_index} of the pass, counted from 0, the "
        f"transform was given {given}."
    )
    error.add_note(" ".join(filter(None, (said, *hints, reason))))


def _describe_all(inputs: tuple[Any, ...]) -> list[str]:
    """Describe the first leaves of the arguments, in order, and count the others."""
    described = [
        f"{_place(inputs, number, leaf)}{_describe(leaf)}"
        for number, value in enumerate(inputs)
        for leaf in leaves_of(value)
    ]
    more = len(described) - _MOST_LISTED
    return described[:_MOST_LISTED] + [f"and {more} more"] * (more > 0)


def _place(inputs: tuple[Any, ...], number: int, leaf: Any) -> str:
    """Name a leaf among several: ``[1]['box']: ``; nothing where it is the only one."""
    if len(inputs) == 1 and inputs[0] is leaf:
        return ""
    path = path_to(inputs[number], leaf).removeprefix("batch")
    argument = f"argument {number}" if len(inputs) > 1 else "argument"
    return f"{argument}{path}: "


def _describe(leaf: Any) -> str:
    name = type(leaf).__qualname__
    if isinstance(leaf, torch.Tensor):
        return f"{name} {tuple(leaf.shape)} {leaf.dtype} on {leaf.device}"
    if is_array(leaf):
        return f"{name} {leaf.shape} {leaf.dtype} in host memory"
    return name


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
