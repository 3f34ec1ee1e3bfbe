"""Into which segments is a chain cut, and how does a member run that is not fused?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from gpuprefetch.augment.column import Size
from gpuprefetch.augment.kornia_plan import Member
from gpuprefetch.augment.operator import register
from gpuprefetch.augment.parameters import Parameters
from gpuprefetch.augment.plan import Plan
from gpuprefetch.augment.sample import Sampler
from gpuprefetch.seeding import generators_seeded

__all__ = ["Segment", "cut", "draw_kept", "run_kept", "split_packs"]


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


def draw_kept(
    module: nn.Module,
    shape: tuple[int, int, int, int],
    generator: torch.Generator | None,
) -> tuple[Any, Size]:
    """Parameters of a member that runs as it is, and the size of its result.

    Kornia draws from torch's CPU generator; with a generator of the caller's, that one
    is seeded from it for the moment and then restored.
    """
    draw = getattr(module, "forward_parameters", None)
    if draw is None:
        return None, shape[2:]
    if generator is None:
        params = draw(torch.Size(shape))
    else:
        seed = int(torch.randint(2**62, (), generator=generator, device="cpu"))
        with generators_seeded(seed, torch.device("cpu")):
            params = draw(torch.Size(shape))
    return params, _kept_size(params, shape[2:])


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


def run_kept(module: nn.Module, image: Tensor, params: Any) -> Tensor:
    if params is None:
        return cast(Tensor, module(image))
    return cast(Tensor, module(image, params=params))


def split_packs(
    flat: Tensor, params: Parameters, segments: tuple[Segment, ...]
) -> list[Tensor]:
    """The pack of each fused segment: consecutive parts of the flat numbers."""
    packs, start, batch = [], 0, params.shape[0]
    for segment in segments:
        if segment.plan is not None:
            end = start + batch * segment.plan.width
            packs.append(flat[start:end].view(batch, segment.plan.width))
            start = end
    return packs
