"""The plan as one torch operator, ``gpuprefetch::augment``.

As an operator it is seen by torch.compile (one opaque node), profilers and the stream
sanitizer. On a CUDA device it launches the kernel; elsewhere, and where the kernel
cannot run, the same function is computed by ``reference`` and a warning says so once.

A plan travels through the operator as a key: its digest, registered by
:func:`register`.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from gpuprefetch.augment.kernel import PIXELS, why_not
from gpuprefetch.augment.plan import Outside, Plan, Resampling
from gpuprefetch.augment.plan_kernel import KernelCall, PlanKernel
from gpuprefetch.augment.reference import apply_plan
from gpuprefetch.augment.variant import How
from gpuprefetch.errors import BatchError

__all__ = ["FULL_SCALE", "augment", "register", "to_unit_range"]

_logger = logging.getLogger(__name__)

FULL_SCALE: Mapping[torch.dtype, float] = {torch.uint8: 255.0, torch.uint16: 65535.0}
"""The number that becomes 1.0, for images of integers."""

_plans: dict[str, PlanKernel] = {}
_warned: set[str] = set()

_LIBRARY: Any = cast(Any, torch.library.Library)("gpuprefetch", "DEF")
_LIBRARY.define(
    "augment(Tensor image, Tensor pack, str plan, ScalarType dtype, "
    "bool is_channels_last, str resampling, str outside) -> Tensor"
)


def register(plan: Plan) -> str:
    """Make a plan known to the operator; returns its key."""
    key = hashlib.sha256(repr(plan.steps).encode()).hexdigest()[:16]
    if key not in _plans:
        _plans[key] = PlanKernel(plan)
    return key


def to_unit_range(image: Tensor) -> Tensor:
    """The image as float32; integers divided by the greatest they can hold.

    Raises:
        BatchError: The dtype is none of ``PIXELS``.
    """
    if image.dtype not in PIXELS:
        accepted = ", ".join(str(dtype).removeprefix("torch.") for dtype in PIXELS)
        raise BatchError(
            f"images of {str(image.dtype).removeprefix('torch.')} cannot be augmented. "
            f"Accepted are {accepted}. {_remedy(image)}"
        )
    scale = FULL_SCALE.get(image.dtype)
    floats = image.to(torch.float32)
    return floats if scale is None else floats.div_(scale)


def _remedy(image: Tensor) -> str:
    if image.is_floating_point():
        return "Pass images.float()."
    return (
        "Pass images.to(torch.uint8) if they hold 0 to 255, or images.float() scaled "
        "to [0, 1]."
    )


def augment(image: Tensor, pack: Tensor, plan: str, how: How) -> Tensor:
    """Run a registered plan.

    Args:
        image: (B, C, H, W), a dtype of ``PIXELS``, any strides.
        pack: (B, n), float32, on the image's device.
        plan: Key from :func:`register`.
        how: Type, layout and resampling of the result.

    Returns:
        (B, C, h, w), without gradients; on CUDA enqueued on the current stream.
    """
    if type(image) is Tensor and image.is_cuda and not _is_watched():
        call = _find_call(image, plan, how)
        if call is not None:
            return call(image, pack)
    # Without gradients on any device: the kernel has none.
    operator = torch.ops.gpuprefetch.augment
    return cast(Tensor, operator(image.detach(), pack, plan, *how))


def _is_watched() -> bool:
    """Whether someone has to see the operator: a compiler, a mode, a profiler.

    Otherwise the kernel is launched without torch's dispatcher, whose way through
    Python and back costs the host more than the launch.
    """
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._autograd._profiler_enabled()
    )


def _find_call(image: Tensor, plan: str, how: How) -> KernelCall | None:
    """What launches the kernel for such images; None where it cannot run."""
    return None if why_not(image.device) else _plans[plan].find(image, how)


def _run(
    image: Tensor,
    pack: Tensor,
    plan: str,
    dtype: torch.dtype,
    is_channels_last: bool,
    resampling: Resampling,
    outside: Outside,
) -> Tensor:
    how = How(dtype, is_channels_last, resampling, outside)
    call = _find_call(image, plan, how)
    if call is not None:
        return call(image, pack)
    _announce(image, plan)
    out = apply_plan(
        _plans[plan].plan,
        to_unit_range(image),
        pack,
        resampling=resampling,
        outside=outside,
    )
    # A plan that changes nothing must not hand the input back: operators do not alias.
    return out.to(dtype, copy=True, memory_format=_format(is_channels_last))


def _announce(image: Tensor, plan: str) -> None:
    """Say once why images on a CUDA device get no kernel."""
    if not image.is_cuda:
        return
    reason = why_not(image.device) or _plans[plan].why_not(image)
    if not reason or reason in _warned:
        return
    _warned.add(reason)
    _logger.warning(
        "the fused kernel does not run: %s. Plain torch operations make the same "
        "pixels, more slowly. To silence this, raise the level of the logger %r.",
        reason,
        __name__,
    )


def _format(is_channels_last: bool) -> torch.memory_format:
    return torch.channels_last if is_channels_last else torch.contiguous_format


def _fake(
    image: Tensor, pack: Tensor, plan: str, dtype: torch.dtype, *how: Any
) -> Tensor:
    size = _plans[plan].plan.output_size((image.shape[-2], image.shape[-1]))
    return torch.empty(
        (image.shape[0], image.shape[1], *size),
        dtype=dtype,
        device=image.device,
        memory_format=_format(how[0]),
    )


_LIBRARY.impl("augment", _run, "CompositeExplicitAutograd")
torch.library.register_fake("gpuprefetch::augment", _fake, lib=_LIBRARY)
