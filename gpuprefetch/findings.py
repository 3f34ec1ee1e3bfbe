"""What in a transform, a batch or the first figures costs time and raises no error?

Pure functions: each gives what it found. When they are asked, and what is done with
the answer, is ``watch``'s to know.
"""

import contextlib
import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch

from gpuprefetch.batch import leaves_of, path_to
from gpuprefetch.containers import has_own_to, tensors_within
from gpuprefetch.cores import FEW_WORKERS, count_cores, workers_for
from gpuprefetch.kinds import (
    is_fused_module,
    is_kornia_augmentation,
    is_kornia_module,
)
from gpuprefetch.move import is_plain_dense
from gpuprefetch.shapes import looks_channels_last, looks_gray
from gpuprefetch.stats import LoaderStats
from gpuprefetch.thresholds import (
    FEWEST_BATCHES,
    HEAVY_SOURCE_MS,
    HEAVY_SOURCE_SHARE,
    NOTHING_TO_GAIN,
    SMALL_BATCH_SHARE,
)

__all__ = [
    "Finding",
    "in_batch",
    "in_figures",
    "in_function",
    "in_images",
    "in_syncs",
    "pageable_leaf",
]

# No usual picture has so many channels, and is 1 to 4 pixels wide besides.
_SURELY_NO_CHANNELS = 16


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that works and costs time."""

    key: str
    """What it is about; told once each."""
    text: str
    """What was found where, and what to do."""


# The transform #


def in_function(
    function: Callable[..., Any], device: torch.device
) -> Iterator[Finding]:
    """Look for what draws random numbers in the wrong place.

    Args:
        function: The user's transform. Kornia modules that it *is* are taken over, with
            their random state; those that it *uses* run as they are.
        device: Where batches lie.
    """
    if is_kornia_module(function) or is_fused_module(function):
        return
    for used in _used_by(function):
        if is_kornia_augmentation(used) and _draws_on(used) == device.type:
            yield Finding(
                "kornia on the device",
                f"the transform uses Kornia's {type(used).__name__}, which was moved "
                f"to {device.type} and draws its random numbers there: the host waits "
                "for each of them. Leave the module on the CPU, or pass it itself as "
                "transform=.",
            )
        elif isinstance(used, torch.Generator) and used.device.type != device.type:
            yield Finding(
                "generator",
                f"the transform holds a torch.Generator on {used.device}, while "
                f"batches are on {device}: each draw is a copy that the host waits "
                "for, and does not follow the batch's seed. Leave it out: torch's own "
                "generators are seeded for every batch.",
            )


def _used_by(function: Callable[..., Any]) -> list[Any]:
    """List a function's own variables, and the members of modules among them."""
    used: list[Any] = []
    waiting: list[Any] = [function]
    while waiting:
        value = waiting.pop()
        if isinstance(value, functools.partial):
            waiting += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, torch.nn.Module):
            for member in value.modules():
                used += [member, *vars(member).values()]
        elif inspect.ismethod(value):
            waiting += [value.__func__, value.__self__]
        elif inspect.isfunction(value):
            named = _named_by(value)
            used += [one for one in named if not isinstance(one, torch.nn.Module)]
            waiting += [one for one in named if isinstance(one, torch.nn.Module)]
        else:
            used += [value, *getattr(value, "__dict__", {}).values()]
    return used


def _named_by(function: FunctionType) -> list[Any]:
    """List the variables of a function that are not its own."""
    known = function.__globals__
    named = [known[name] for name in function.__code__.co_names if name in known]
    for cell in function.__closure__ or ():
        # Empty while nothing was assigned; inspect.getclosurevars would raise.
        with contextlib.suppress(ValueError):
            named.append(cell.cell_contents)
    return named


def _draws_on(module: Any) -> str:
    """Name the type of the device on which a Kornia augmentation draws."""
    generator = getattr(module, "_param_generator", None)
    device = getattr(generator, "device", None)
    return "" if device is None else torch.device(device).type


# The first batch #


def in_batch(batch: Any, *, is_source_pinning: bool) -> Iterator[Finding]:
    """Look for leaves that are not pinned, though they could be.

    Args:
        batch: As the source gave it.
        is_source_pinning: The source was asked to pin its batches.
    """
    for leaf in leaves_of(batch):
        if isinstance(leaf, torch.Tensor) or not has_own_to(leaf):
            continue
        if any(map(_is_pageable, tensors_within(leaf))):
            name = type(leaf).__qualname__
            yield Finding(
                f"object {name}",
                f"{path_to(batch, leaf)} is a {name} in pageable memory that moves "
                "itself: its copy blocks the loop. Give the class a pin_memory() "
                "method that returns a pinned copy, and pass "
                "DataLoader(pin_memory=True).",
            )
    leaf = pageable_leaf(batch)
    if is_source_pinning and leaf is not None:
        yield Finding(
            "left unpinned",
            f"{path_to(batch, leaf)} is not pinned, though the DataLoader has "
            "pin_memory=True: torch does not look into a dataclass or a class of your "
            "own. The loader packs it once more. Give the class a pin_memory() "
            "method, or leave pin_memory=True out.",
        )


def in_images(inputs: tuple[Any, ...], batch: Any) -> Iterator[Finding]:
    """Look for images of which Kornia would take the rows, or the batch, for channels.

    Args:
        inputs: What a Kornia augmentation gets of the first batch.
        batch: The whole of it, with the labels.
    """
    image = inputs[0]
    if not isinstance(image, torch.Tensor) or image.is_nested:
        return
    shape = tuple(image.shape)
    if looks_channels_last(shape) and min(shape[1:3]) >= _SURELY_NO_CHANNELS:
        yield Finding(
            "channels last",
            f"the images for Kornia have the shape {shape}, which looks like (B, H, W, "
            f"C). Kornia takes (B, C, H, W), here {shape[1]} channels of {shape[2]} x "
            f"{shape[3]} pixels, and augments those. Pass images.permute(0, 3, 1, 2), "
            "in the collate function.",
        )
    labels = _labels_of(batch, image) if looks_gray(shape) else None
    if labels is not None:
        yield Finding(
            "gray",
            f"the images for Kornia have the shape {shape}, and "
            f"{path_to(batch, labels)} has {len(labels)} entries, which looks like "
            "gray images (B, H, W). For Kornia a 3-d tensor is one image (C, H, W): "
            "the whole batch gets one draw. Pass images.unsqueeze(1), in the collate "
            "function.",
        )


def _labels_of(batch: Any, image: torch.Tensor) -> torch.Tensor | None:
    """Find what has one number, or one row, for each image."""
    for leaf in leaves_of(batch):
        if leaf is image or not isinstance(leaf, torch.Tensor) or leaf.is_nested:
            continue
        if leaf.ndim in (1, 2) and len(leaf) == len(image):
            return leaf
    return None


def pageable_leaf(batch: Any) -> torch.Tensor | None:
    """Find the largest tensor of a batch that is not pinned."""
    leaves = (leaf for leaf in leaves_of(batch) if is_plain_dense(leaf))
    pageable = [leaf for leaf in leaves if leaf.nbytes and _is_pageable(leaf)]
    return max(pageable, key=lambda leaf: leaf.nbytes, default=None)


def _is_pageable(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and not tensor.is_pinned()


# Waits of the transform #


def in_syncs(places: Iterable[str]) -> Iterator[Finding]:
    """Name where a call of the transform made the host wait for the device."""
    counts = Counter(places)
    if not counts:
        return
    (first, _), *others = counts.most_common()
    more = f" and at {len(others)} other places" if others else ""
    yield Finding(
        "waits for the device",
        f"the transform makes the host wait for the device {counts.total()} times a "
        f"batch, at {first}{more}: nothing is issued ahead meanwhile. Usual causes: "
        ".item(), .tolist(), a bool mask as an index, torch.tensor(..., device=...), "
        "a copy from the CPU. Keep such values on the device.",
    )


# Figures #


def in_figures(stats: LoaderStats, pageable_path: str) -> Iterator[Finding]:
    """Look for what the figures of the first batches show.

    Args:
        stats: After some 30 batches, or of a shorter pass.
        pageable_path: Names the largest leaf that arrives unpinned; may be empty.
    """
    period_ms = stats.period_ms.mean
    if stats.batches < FEWEST_BATCHES or period_ms <= 0:
        return
    source_ms = stats.source_wait_ms.mean
    if (
        stats.num_workers == 0
        and source_ms >= HEAVY_SOURCE_MS
        and source_ms >= HEAVY_SOURCE_SHARE * period_ms
    ):
        yield Finding(
            "num_workers=0",
            f"DataLoader(num_workers=0) makes its batches in this process: the loop "
            f"waits {source_ms:.1f} of {period_ms:.1f} ms a batch for them. Pass "
            f"num_workers={_workers_to_pass()}.",
        )
    if not stats.is_overlapped:
        return  # Nothing is copied or overlapped there.
    # While a pass runs, its newest batch has parts and no period yet.
    pin_ms = min(stats.pin_ms.mean, period_ms)
    is_long = pin_ms >= NOTHING_TO_GAIN * period_ms
    # Hidden behind the step, it costs nothing.
    is_felt = not stats.stall_ms.count or (
        stats.stall_ms.mean >= NOTHING_TO_GAIN * period_ms
    )
    if not stats.is_threaded and is_long and is_felt:
        yield Finding(
            "pageable",
            f"{pageable_path or 'the batch'} arrives in pageable memory, and packing "
            f"it takes the loop {pin_ms:.2f} of {period_ms:.2f} ms a batch. Pass "
            "background=True, or DataLoader("
            f"num_workers={workers_for(FEW_WORKERS)}, pin_memory=True).",
        )
    on_device_ms = stats.copy_ms.mean + stats.transform_ms.mean
    own_ms = stats.own_ms
    if own_ms >= SMALL_BATCH_SHARE * period_ms and own_ms >= on_device_ms:
        yield Finding(
            "small batch",
            f"handling a batch takes the loader {own_ms:.2f} of {period_ms:.2f} ms, "
            f"and all that it hides is {on_device_ms:.2f} ms of copy and transform. "
            "Use larger batches, or no prefetching.",
        )


def _workers_to_pass() -> str:
    workers = workers_for(FEW_WORKERS)
    more = ", or as many as there are cores to spare"
    return f"{workers}{more if count_cores() > workers else ''}"
