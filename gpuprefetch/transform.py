"""What happens to a batch once it is on the device?

The user's ``transform`` gets the inputs that ``inputs`` names, or ``batch_transform``
gets the whole batch; random numbers come from the batch's seed. A transform that draws
from its own generator (:class:`SeededTransform`) is given the seed; for any other the
global generators are set and put back.
"""

from collections.abc import Callable
from inspect import isbuiltin
from typing import Any, Protocol, cast, runtime_checkable

import torch

from gpuprefetch.batch import map_leaves
from gpuprefetch.errors import TransformError
from gpuprefetch.foreign import why_not_taken_over
from gpuprefetch.given import note_what_was_given
from gpuprefetch.kinds import is_array, is_fused_module, is_kornia_module
from gpuprefetch.move import check_on_device
from gpuprefetch.seeding import BatchSeeds, generators_seeded
from gpuprefetch.selection import Selection

__all__ = [
    "Applies",
    "DeviceTransform",
    "ReplayedTransform",
    "SeededTransform",
    "adapt_transform",
    "describe_transform",
    "fusion_of",
    "is_graphed",
]


@runtime_checkable
class SeededTransform(Protocol):
    """A transform that takes seeds and leaves the global generators alone."""

    def apply_batch(
        self, inputs: tuple[Any, ...], seeds: BatchSeeds, batch_index: int
    ) -> Any:
        """Transform one batch; equal seeds and equal indices give equal results."""


class Applies(Protocol):
    """What a pass needs of a transform."""

    def apply(self, batch: Any, batch_index: int) -> Any:
        """Transform one batch on the device."""


@runtime_checkable
class ReplayedTransform(Protocol):
    """A transform that may know that it draws no random numbers for some inputs."""

    def without_draws(self, inputs: tuple[Any, ...]) -> Callable[[], Any] | None:
        """Give what transforms these inputs; ``None``: call it like any other."""


class DeviceTransform:
    """Applies the user's function to batches on the device.

    Args:
        function: ``transform``, ``batch_transform``, or a transform made from it.
        selection: What ``function`` gets; ``None`` for the whole batch.
        seeds: Where its random numbers come from.
        device: Where batches lie and must stay.
        copies_inputs: The inputs may be the source's own tensors, into which an
            in-place function must not write.
    """

    def __init__(
        self,
        function: Callable[..., Any] | SeededTransform,
        *,
        selection: Selection | None,
        seeds: BatchSeeds,
        device: torch.device,
        copies_inputs: bool,
    ) -> None:
        self._function = function
        # Asked once: asking a protocol takes longer than drawing the numbers.
        self._seeded = function if isinstance(function, SeededTransform) else None
        self._replayed = function if isinstance(function, ReplayedTransform) else None
        self._copies_inputs = copies_inputs
        self._selection = selection
        self._seeds = seeds
        self._device = device

    def apply(self, batch: Any, batch_index: int) -> Any:
        """Transform one batch; a ``None`` batch passes by.

        The caller has set torch's modes; see ``scope``.

        Raises:
            SelectionError: The batch does not have what ``inputs`` names.
            TransformError: The result cannot take the inputs' place.
        """
        if batch is None:
            return None
        inputs = (batch,) if self._selection is None else self._selection.take(batch)
        try:
            result = self._call(inputs, batch_index)
        except Exception as error:
            note_what_was_given(error, inputs, batch_index, self._function)
            raise
        placed = result
        if self._selection is not None:
            placed = self._selection.put(batch, result)
        # What nearly every transform returns is told sooner than asked about.
        if type(result) is not torch.Tensor or result.device != self._device:
            _check_kind(result)
            check_on_device(result, placed, self._device)
        return placed

    def _call(self, inputs: tuple[Any, ...], batch_index: int) -> Any:
        if self._seeded is not None:
            return self._seeded.apply_batch(inputs, self._seeds, batch_index)
        if self._replayed is not None:
            replay = self._replayed.without_draws(inputs)
            if replay is not None:
                return replay()
        if self._copies_inputs:
            inputs = map_leaves(inputs, _clone)
        with generators_seeded(self._seeds.of_batch(batch_index), self._device):
            return cast(Callable[..., Any], self._function)(*inputs)


def _check_kind(result: Any) -> None:
    """Refuse what a function returns by mistake."""
    if result is None:
        raise TransformError(
            "the transform returned None. Return the result; for a function that works "
            "in place, its argument."
        )
    if is_array(result):
        raise TransformError(
            "the transform returned a NumPy array, which lies in host memory. A "
            "transform must return tensors on the device. If it got one, too: turn it "
            "into a tensor in the collate function, with torch.from_numpy."
        )


def _clone(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def adapt_transform(
    transform: Callable[..., Any],
) -> Callable[..., Any] | SeededTransform:
    """Take over a Kornia augmentation; return every other function as it is.

    A Kornia augmentation, one of its containers, or an ``nn.Sequential`` of those is
    copied, so the user's module never sees a batch, and runs fused as far as it goes;
    so does what ``augment.fuse`` returned. Neither Kornia nor the augmentation package
    is loaded for anything else.
    """
    if not is_kornia_module(transform) and not is_fused_module(transform):
        return transform
    from gpuprefetch.augment.seeded import adapt_kornia

    return adapt_kornia(cast(torch.nn.Module, transform))


def describe_transform(transform: Callable[..., Any] | None) -> str:
    """Name a transform for people: its class or function, and how Kornia's is run."""
    if transform is None:
        return "none"
    # Torch's own functions are methods of a hidden class.
    attribute = "__name__" if isbuiltin(transform) else "__qualname__"
    name = str(getattr(transform, attribute, type(transform).__qualname__))
    fusion = fusion_of(transform)
    return f"{name} ({fusion})" if fusion else name


def fusion_of(transform: Callable[..., Any] | None) -> str:
    """Say whether a Kornia module runs fused, or why not; empty for all else.

    A module that only holds some has a reason, too.
    """
    if is_fused_module(transform):
        return str(cast(Any, transform).summary)
    if not is_kornia_module(transform):
        reason = why_not_taken_over(transform)
        return f"not fused: {reason.removesuffix('.')}" if reason else ""
    from gpuprefetch.augment.eligible import describe

    return describe(cast(torch.nn.Module, transform))


def is_graphed(transform: Callable[..., Any] | None) -> bool:
    """Tell whether ``fuse`` made it and was asked to run members as CUDA graphs."""
    return is_fused_module(transform) and cast(Any, transform).kept == "graphed"
