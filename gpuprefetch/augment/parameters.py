"""The numbers drawn for one batch, and how they turn into Kornia's ``params``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gpuprefetch.augment.column import Size
from gpuprefetch.augment.convert import from_kornia, to_kornia
from gpuprefetch.augment.kornia_plan import is_chain
from gpuprefetch.augment.plan import Plan
from gpuprefetch.errors import TransformError

__all__ = [
    "Parameters",
    "join_packs",
    "params_from_kornia",
    "params_to_kornia",
    "refuse_capture",
    "ship",
]

_Pieces = Sequence[tuple[Plan | None, int]]
"""Per segment: its plan, or None for a member that runs as it is; number of members."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """What :meth:`FusedAugmentation.sample` drew. Valid for any number of calls."""

    shape: tuple[int, int, int, int]
    """(B, C, H, W) of the images."""
    flat: Tensor
    """The packs of all fused segments one after the other, float32, in host memory."""
    kept: tuple[Any, ...]
    """Kornia's own parameters of each member that runs as it is."""
    sizes: tuple[Size, ...]
    """Size of the image before each segment, and of the result."""

    def packs(self, widths: Sequence[int], flat: Tensor | None = None) -> list[Tensor]:
        """The packs, (B, n) each, as views of ``flat``, or of that in host memory."""
        flat = self.flat if flat is None else flat
        parts = torch.split(flat, [self.shape[0] * width for width in widths])
        return [
            part.view(self.shape[0], width)
            for part, width in zip(parts, widths, strict=True)
        ]


def params_to_kornia(module: nn.Module, pieces: _Pieces, params: Parameters) -> Any:
    """Nested as ``module`` nests: a dictionary, or a list of those or of ParamItems."""
    return _nest(module, iter(list(_member_params(pieces, params))))


def _member_params(pieces: _Pieces, params: Parameters) -> Iterator[Any]:
    packs = iter(params.packs([plan.width for plan, _ in pieces if plan is not None]))
    kept = iter(params.kept)
    for (plan, _), size in zip(pieces, params.sizes, strict=False):
        if plan is None:
            yield next(kept)
            continue
        pack = next(packs)
        for step, columns, before in plan.walk(size):
            yield to_kornia(step, columns, pack, before, params.shape[1])


def _nest(module: nn.Module, members: Iterator[Any]) -> Any:
    if not is_chain(module):
        return next(members)
    if type(module) is nn.Sequential:
        return [_nest(child, members) for child in module]
    item = sys.modules["kornia.augmentation.container.params"].ParamItem
    return [
        item(name, _nest(child, members)) for name, child in module.named_children()
    ]


def _flatten(module: nn.Module, params: Any) -> Iterator[Any]:
    if not is_chain(module):
        yield params
    elif type(module) is nn.Sequential:
        for child, one in zip(module, params, strict=True):
            yield from _flatten(child, one)
    else:
        for (_, child), item in zip(module.named_children(), params, strict=True):
            yield from _flatten(child, item.data)


def params_from_kornia(
    module: nn.Module, pieces: _Pieces, params: Any, shape: tuple[int, ...]
) -> Parameters:
    """The inverse of :func:`params_to_kornia`.

    Raises:
        TransformError: The parameters do not have the module's structure.
    """
    batch, channels, height, width = shape
    try:
        members = iter(list(_flatten(module, params)))
        packs, kept = [], []
        size: Size = (height, width)
        sizes = [size]
        for plan, _ in pieces:
            if plan is None:
                kept.append(next(members))
            else:
                pack = torch.zeros(batch, plan.width)
                for step, columns, before in plan.walk(size):
                    from_kornia(step, columns, next(members), pack, before)
                packs.append(pack)
                size = plan.output_size(size)
            sizes.append(size)
    except (LookupError, TypeError, AttributeError, StopIteration, ValueError) as error:
        raise TransformError(
            f"params do not have the structure of {type(module).__name__}'s own: "
            f"{error}. Pass what sample() returned, or the module's _params."
        ) from error
    flat = join_packs(packs)
    return Parameters((batch, channels, height, width), flat, tuple(kept), tuple(sizes))


def join_packs(packs: list[Tensor]) -> Tensor:
    """Packs one after the other."""
    return torch.cat([pack.view(-1) for pack in packs]) if packs else torch.empty(0)


def refuse_capture() -> None:
    """Refuse to ship numbers into a CUDA graph that is being captured.

    The graph would read the same host memory at each replay, and torch's allocator
    gives that to others meanwhile.

    Raises:
        TransformError: The current stream is being captured.
    """
    if torch.cuda.is_current_stream_capturing():
        raise TransformError(
            "numbers of an augmentation are drawn on the host, so a CUDA graph cannot "
            "hold them. Augment before the captured step, or capture with params= "
            "whose `flat` lies on the device."
        )


def ship(flat: Tensor, device: torch.device) -> Tensor:
    """The numbers on the device: one copy from pinned memory; nobody waits for it."""
    if flat.device == device or device.type != "cuda" or flat.numel() == 0:
        return flat.to(device)
    refuse_capture()
    # The pinned block returns to torch's host allocator at once; the allocator hands it
    # out again only after the copy, whose stream it records.
    if not flat.is_pinned():
        flat = torch.empty_like(flat, pin_memory=True).copy_(flat)
    return flat.to(device, non_blocking=True)
