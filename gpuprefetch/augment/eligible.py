"""Does a Kornia module run fused inside a loader, and how is that said?

A chain that fuses in part runs in parts. In a loader it runs as a whole by Kornia where
that would not be the same, see :func:`why_whole`; ``fuse`` does so only where it must.
"""

from __future__ import annotations

from typing import Any, cast

from torch import nn

from gpuprefetch.augment.kornia_plan import Member, read_members
from gpuprefetch.augment.labels import LABELS, changes_labels, mask_settings_reason

__all__ = ["data_keys_of", "describe", "describe_members", "why_one_piece", "why_whole"]

# Bases of those of Kornia's classes that take one batch of images, draw by
# `forward_parameters` and return the batch.
_BETWEEN = {"IntensityAugmentationBase2D", "GeometricAugmentationBase2D"}


def why_whole(module: nn.Module) -> str:
    """Why Kornia runs the whole module; empty: it runs fused, at least in part."""
    return _why_whole(module, read_members(module))


def _why_whole(module: nn.Module, members: tuple[Member, ...]) -> str:
    kept = [member for member in members if member.step is None]
    if len(kept) == len(members):
        return _reasons(kept)
    alone = next((member for member in kept if not _runs_between(member)), None)
    if alone is not None:
        return f"{type(alone.module).__name__} does not run between fused members"
    return why_one_piece(module, members)


def why_one_piece(module: nn.Module, members: tuple[Member, ...]) -> str:
    """Why a module cannot be cut at all, even by a caller who asks for it."""
    kept = [member for member in members if member.step is None]
    volumes = next((member for member in kept if not _takes_images(member)), None)
    if volumes is not None:
        return f"{type(volumes.module).__name__} does not take images (B, C, H, W)"
    if not hasattr(module, "data_keys"):
        return ""
    if cast(Any, module).data_keys is None:
        return "data_keys=None takes dictionaries"
    keys = data_keys_of(module)
    if keys[0] not in ("image", "input"):
        return f"data_keys {list(keys)} do not begin with an image"
    unknown = [key for key in keys[1:] if key not in LABELS]
    if unknown:
        return f"data_keys {unknown} have no fused way"
    if len(keys) > 1:
        if any(changes_labels(member.module) for member in kept):
            return f"labels follow it; {_reasons(kept)}"
        return mask_settings_reason(module)
    return ""


def data_keys_of(module: nn.Module) -> tuple[str, ...]:
    """Names of what a module takes; of a plain chain or augmentation: one image."""
    keys = getattr(module, "data_keys", None) or ("image",)
    return tuple(str(getattr(key, "name", key)).lower() for key in keys)


def _takes_images(member: Member) -> bool:
    kinds = {base.__name__ for base in type(member.module).__mro__}
    return not kinds & {"AugmentationBase3D", "VideoSequential"}


def _runs_between(member: Member) -> bool:
    return any(base.__name__ in _BETWEEN for base in type(member.module).__mro__)


def _reasons(kept: list[Member]) -> str:
    seen = {type(member.module).__name__: member.reason for member in kept}
    return "; ".join(f"{name}: {reason}" for name, reason in seen.items())


def describe(module: nn.Module) -> str:
    """Say in a few words how a loader runs a Kornia module."""
    members = read_members(module)
    whole = _why_whole(module, members)
    if whole:
        return f"not fused, Kornia: {whole}"
    return describe_members(members)


def describe_members(members: tuple[Member, ...]) -> str:
    """Say which members of a chain that is run in parts are not fused, and why."""
    kept = [member for member in members if member.step is None]
    if len(kept) == len(members):
        return f"not fused, Kornia: {_reasons(kept)}"
    return f"fused, except {_reasons(kept)}" if kept else "fused"
