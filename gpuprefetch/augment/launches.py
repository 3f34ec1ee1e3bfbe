"""Into which launches is a plan cut, and why?

One pass does geometry, then steps that look at one pixel at a time, then at most one
blur, then steps that look at one value at a time. What does not follow in that order
begins another pass, which reads the first one's float32 result.

A step that needs the mean of the whole image is in a pass like the others, behind a
*mean launch*: the same geometry and the steps before, but instead of pixels it leaves
the sums of its tiles.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from gpuprefetch.augment.plan import Plan
from gpuprefetch.augment.steps import (
    Affine,
    Crop,
    Geometric,
    Resize,
    ResizedCrop,
    Rotation,
    Step,
)
from gpuprefetch.augment.values import Blur, Erase, Jitter, Pointwise

__all__ = [
    "Launch",
    "count_launches",
    "explain_steps",
    "mean_launch",
    "split_launches",
]

_Stage = Literal["geometry", "pixels", "blurred"]


@dataclass(frozen=True, slots=True)
class Launch:
    """Steps ``first`` to ``last`` (excluded) of a plan, which are done in one pass."""

    first: int
    last: int
    why: str = ""
    """Why ``first`` could not join the pass before; empty for the first pass."""
    is_mean: bool = False
    """The pass ends within its last step and leaves sums instead of pixels."""


@dataclass(slots=True)
class _Pass:
    """What the pass holds so far."""

    stage: _Stage = "geometry"
    has_level: bool = False
    has_padding: bool = False
    has_mean: bool = False

    def why_not(self, step: Step) -> str:
        """Why the step cannot join; empty: it can."""
        if isinstance(step, Geometric):
            if self.stage != "geometry":
                return "it moves pixels whose values have been changed"
            if _pads(step) and (self.has_level or self.has_padding):
                return "it pads an image that was resampled or padded"
        elif isinstance(step, Blur):
            if self.stage == "blurred":
                return "there is a blur before it"
        elif self.stage == "blurred" and not isinstance(step, Pointwise | Erase):
            return "it needs all channels of a blurred pixel"
        elif _needs_mean(step) and self.has_mean:
            return "its contrast needs a mean after one that was needed before"
        return ""

    def join(self, step: Step) -> None:
        if isinstance(step, Blur):
            self.stage = "blurred"
        elif not isinstance(step, Geometric) and self.stage == "geometry":
            self.stage = "pixels"
        self.has_padding = self.has_padding or _pads(step)
        self.has_mean = self.has_mean or _needs_mean(step)
        self.has_level = self.has_level or isinstance(
            step, Resize | ResizedCrop | Rotation | Affine
        )


def _pads(step: Step) -> bool:
    return isinstance(step, Crop) and (any(step.padding) or step.pad_if_needed)


def _needs_mean(step: Step) -> bool:
    return isinstance(step, Jitter) and step.needs_mean


def split_launches(plan: Plan) -> tuple[Launch, ...]:
    """Cut a plan where one pass cannot go on; mean launches come on top."""
    launches: list[Launch] = []
    first, why, current = 0, "", _Pass()
    for index, step in enumerate(plan.steps):
        reason = current.why_not(step)
        if reason:
            launches.append(Launch(first, index, why))
            first, why, current = index, reason, _Pass()
        current.join(step)
    if plan.steps:
        launches.append(Launch(first, len(plan.steps), why))
    return tuple(launches)


def mean_launch(plan: Plan, launch: Launch) -> Launch | None:
    """What has to run before a pass to give it the mean of each image."""
    for index in range(launch.first, launch.last):
        if _needs_mean(plan.steps[index]):
            return replace(launch, last=index + 1, is_mean=True)
    return None


def count_launches(plan: Plan) -> int:
    """Kernel launches per batch, those for means included."""
    launches = split_launches(plan)
    return sum(1 + (mean_launch(plan, launch) is not None) for launch in launches)


def explain_steps(plan: Plan) -> tuple[str, ...]:
    """For each step: which launch it makes necessary, and why; mostly empty."""
    why = {launch.first: launch.why for launch in split_launches(plan) if launch.why}
    said = []
    for index, step in enumerate(plan.steps):
        reasons = []
        if index in why:
            reasons.append(f"in a new launch, since {why[index]}")
        if _needs_mean(step):
            reasons.append("after a launch for the mean of each image")
        said.append(", ".join(reasons))
    return tuple(said)
