"""``fuse(module)``: which settings does it take, and what does it refuse?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from gpuprefetch.augment.fused import FusedAugmentation
from gpuprefetch.augment.kept_graphs import Kept
from gpuprefetch.augment.plan import Outside, Resampling
from gpuprefetch.errors import SettingError, SettingTypeError
from gpuprefetch.foreign import find_foreign
from gpuprefetch.kinds import is_kornia_module
from gpuprefetch.plural import with_article

__all__ = ["fuse"]


def fuse(
    module: nn.Module,
    *,
    dtype: torch.dtype = torch.float32,
    memory_format: torch.memory_format = torch.contiguous_format,
    resampling: Resampling = "chained",
    outside: Outside = "zeros",
    kept: Kept = "eager",
) -> FusedAugmentation:
    """Turn a Kornia augmentation into one kernel, as far as it goes.

    Args:
        module: A Kornia augmentation, container, or ``nn.Sequential`` of those. It is
            copied: later changes to it have no effect, and it never sees a batch.
        dtype: Of the images returned: float32, float16 or bfloat16.
        memory_format: ``torch.contiguous_format`` or ``torch.channels_last``.
        resampling: ``"chained"`` resamples as often as Kornia does and equals it to
            1e-4; ``"single"`` resamples once, which is sharper and faster.
        outside: For ``"single"``, what a rotation after a crop shows beyond the crop:
            black (``"zeros"``), or the image there (``"extend"``).
        kept: How members without a fused step run on a CUDA device: as Kornia runs them
            (``"eager"``), or each as a CUDA graph (``"graphed"``), which costs the host
            little. Then a member must do the same device work for every batch, with
            the numbers that it drew before: one of your own that goes by a counter, or
            reads a setting that changes, would be frozen. Each graph is compared with
            its member for other numbers first. What cannot be captured runs as it is,
            and a line in the log says so once.

    Returns:
        A module: ``fused(images, *labels, params=None, generator=None)``. Its ``repr``
        says which members run fused and why any does not.

    Raises:
        SettingError: A setting has another value than those above.
        SettingTypeError: ``module`` is not a Kornia module.
    """
    if not is_kornia_module(module):
        raise SettingTypeError(
            "fuse() takes a Kornia augmentation, a Kornia container or an "
            f"nn.Sequential of those, got {_describe(module)}"
        )
    _require("dtype", dtype, (torch.float32, torch.float16, torch.bfloat16))
    _require(
        "memory_format", memory_format, (torch.contiguous_format, torch.channels_last)
    )
    _require("resampling", resampling, ("chained", "single"))
    _require("outside", outside, ("zeros", "extend"))
    _require("kept", kept, ("eager", "graphed"))
    # Imports Kornia, which whoever has a module of its has imported already.
    from gpuprefetch.augment.kornia_adapter import KorniaTransform

    return FusedAugmentation(
        KorniaTransform(module),
        dtype=dtype,
        memory_format=memory_format,
        resampling=resampling,
        outside=outside,
        kept=kept,
    )


def _describe(module: object) -> str:
    foreign = find_foreign(module)
    if foreign is not None:
        path, name = foreign[0], type(foreign[1]).__name__
        return (
            f"an nn.Sequential whose member {path} is {with_article(name)}, which is "
            "none of them. Make it a subclass of Kornia's IntensityAugmentationBase2D, "
            "or leave it out."
        )
    if type(module) is nn.Sequential:
        return "an empty nn.Sequential."
    return f"{type(module).__name__}."


def _require(name: str, value: object, accepted: Sequence[object]) -> None:
    if value not in accepted:
        choices = ", ".join(repr(choice) for choice in accepted)
        raise SettingError(f"{name} must be one of {choices}, got {value!r}.")
