"""Into which segments is a chain cut, and how are the numbers of one drawn?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from gpuprefetch.augment.column import Size
from gpuprefetch.augment.kornia_plan import Member
from gpuprefetch.augment.launches import explain_steps
from gpuprefetch.augment.operator import register
from gpuprefetch.augment.parameters import ship
from gpuprefetch.augment.plan import Plan
from gpuprefetch.augment.sample import Sampler
from gpuprefetch.errors import BatchError, TransformError
from gpuprefetch.kinds import is_array
from gpuprefetch.plural import with_article
from gpuprefetch.seeding import generators_seeded

__all__ = [
    "Segment",
    "as_batch",
    "check_size",
    "cut",
    "describe_segment",
    "draw_for",
    "draw_kept",
    "draw_segment",
    "in_order",
    "run_kept",
]


@dataclass(frozen=True, slots=True)
class Segment:
    """Members that run together: one plan, or one module as it is."""

    members: tuple[Member, ...]
    plan: Plan | None
    key: str
    """The plan's key for the operator."""
    sampler: Sampler | None


def cut(members: tuple[Member, ...]) -> tuple[Segment, ...]:
    """Runs of members with a step, and single members without."""
    runs: list[list[Member]] = []
    for member in members:
        joins = runs and member.step is not None and runs[-1][-1].step is not None
        if joins:
            runs[-1].append(member)
        else:
            runs.append([member])
    segments = []
    for run in runs:
        steps = tuple(member.step for member in run if member.step is not None)
        plan = Plan(steps) if steps else None
        key = register(plan) if plan else ""
        sampler = Sampler(plan) if plan else None
        segments.append(Segment(tuple(run), plan, key, sampler))
    return tuple(segments)


def draw_segment(
    segment: Segment,
    shape: Sequence[int],
    generator: torch.Generator | None,
    *,
    is_pinned: bool = False,
) -> tuple[Any, Size]:
    """The numbers of one segment for images (B, C, H, W), and its result's size.

    The numbers are a pack (B, n), or what :func:`draw_kept` gives.
    """
    batch, _, height, width = shape
    if segment.sampler is None or segment.plan is None:
        return draw_kept(segment.members[0].module, shape, generator)
    pack = segment.sampler(batch, (height, width), generator, is_pinned=is_pinned)
    return pack, segment.plan.output_size((height, width))


# Torch's compiler cannot follow a draw from a generator into numpy.
_draw_uncompiled: Callable[..., tuple[Any, Size]] = _disable_dynamo(draw_segment)


def describe_segment(segment: Segment) -> list[str]:
    """One line per member: whether it is fused, and why if it is not."""
    lines = []
    reasons = explain_steps(segment.plan) if segment.plan else ()
    for member, why in zip_longest(segment.members, reasons, fillvalue=""):
        assert isinstance(member, Member)
        how = f"fused, {why}" if why else "fused"
        if member.step is None:
            how = f"as it is: {member.reason}"
        lines.append(f"({member.name}) {type(member.module).__name__}: {how}")
    return lines


def draw_kept(
    module: nn.Module, shape: Sequence[int], generator: torch.Generator | None
) -> tuple[Any, Size]:
    """What a member needs that runs as it is, and the size of its result, if it tells.

    Kornia draws from torch's CPU generator; with a generator of the caller's, that one
    is seeded from it for the moment and then restored.

    Returns:
        Kornia's parameters; of a module that cannot draw in advance, a seed.
    """
    size = (shape[-2], shape[-1])
    draw = getattr(module, "forward_parameters", None)
    if draw is None:
        return _draw_seed(generator), size
    if generator is None:
        params = draw(torch.Size(shape))
    else:
        with generators_seeded(_draw_seed(generator), torch.device("cpu")):
            params = draw(torch.Size(shape))
    return params, _kept_size(params, size)


def _draw_seed(generator: torch.Generator | None) -> int:
    return int(torch.randint(2**62, (), generator=generator, device="cpu"))


def _kept_size(params: Any, size: Size) -> Size:
    if isinstance(params, dict) and "output_size" in params and _shape_changes(params):
        height, width = params["output_size"][0].tolist()
        return int(height), int(width)
    if isinstance(params, list):
        for item in params:
            size = _kept_size(item.data, size)
    return size


def _shape_changes(params: dict[str, Tensor]) -> bool:
    """Whether a batch-wide gate of a size-changing member is open."""
    gate = params["batch_prob"]
    return gate.numel() > 0 and bool(gate[0] > 0.5)


def run_kept(module: nn.Module, image: Tensor, drawn: Any) -> Tensor:
    """Run a member as it is, with what :func:`draw_kept` gave."""
    if isinstance(drawn, int):
        with generators_seeded(drawn, image.device):
            return cast(Tensor, module(image))
    return cast(Tensor, module(image, params=drawn))


def as_batch(image: Any) -> Tensor:
    """(B, C, H, W) of one image, of (C, H, W), or of (H, W).

    Raises:
        BatchError: It is no tensor, or has another number of dimensions.
    """
    if not isinstance(image, Tensor) or image.ndim not in (2, 3, 4):
        came = f" with {image.ndim} dimensions" if isinstance(image, Tensor) else ""
        how = ", by torch.from_numpy" if is_array(image) else ""
        raise BatchError(
            f"an image is {with_article(type(image).__name__)}{came}; pass a tensor "
            f"(B, C, H, W) or (C, H, W){how}."
        )
    return image[(None,) * (4 - image.ndim)]


def draw_for(piece: Segment, image: Tensor, generator: torch.Generator | None) -> Any:
    """The numbers of one segment, on the images' device."""
    draw = _draw_uncompiled if torch.compiler.is_compiling() else draw_segment
    drawn, _ = draw(piece, image.shape, generator, is_pinned=image.is_cuda)
    return drawn if piece.plan is None else ship(drawn, image.device)


def in_order(
    pieces: Sequence[Segment], packs: Sequence[Tensor], kept: Sequence[Any]
) -> Iterator[Any]:
    """What was drawn, segment by segment."""
    of_plans, of_kept = iter(packs), iter(kept)
    return (next(of_kept if piece.plan is None else of_plans) for piece in pieces)


def check_size(piece: Segment, image: Tensor, expected: Size) -> None:
    """Refuse images of another size than the numbers of a segment were drawn for.

    The kernel trusts its numbers: a window beyond the image would read strange memory.

    Raises:
        TransformError: The sizes differ.
    """
    size = tuple(image.shape[-2:])
    if size != expected:
        raise TransformError(
            f"{type(piece.members[0].module).__name__} gets images of {size} (height, "
            f"width), but its parameters were drawn for {expected}: the member before "
            "it changes the size and does not say so. Give its parameters an "
            "'output_size', as Kornia's own have; or call without params= and labels."
        )
