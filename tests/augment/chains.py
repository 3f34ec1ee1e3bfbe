"""Kornia members and chains that the tests of the appliers share."""

from __future__ import annotations

from collections.abc import Callable

import kornia.augmentation as K
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from gpuprefetch.augment.kornia_plan import read_members
from gpuprefetch.augment.plan import Plan

MEAN, STD = torch.tensor([0.5, 0.45, 0.4]), torch.tensor([0.25, 0.2, 0.3])

MEMBERS: dict[str, Callable[[], nn.Module]] = {
    "crop": lambda: K.RandomCrop((20, 30)),
    "crop padded": lambda: K.RandomCrop((30, 44), padding=(1, 2, 3, 4), fill=0.5),
    "crop padded per channel": lambda: K.RandomCrop(
        (30, 44), padding=4, fill=[0.1, 0.2, 0.3]
    ),
    "crop if needed": lambda: K.RandomCrop((44, 60), pad_if_needed=True),
    "crop reflect": lambda: K.RandomCrop(
        (44, 60), pad_if_needed=True, padding_mode="reflect"
    ),
    "crop replicate": lambda: K.RandomCrop(
        (30, 44), padding=6, padding_mode="replicate"
    ),
    "crop resample": lambda: K.RandomCrop(
        (20, 30), padding=3, cropping_mode="resample"
    ),
    "center crop": lambda: K.CenterCrop((21, 30)),
    "resized crop up": lambda: K.RandomResizedCrop((50, 61)),
    "resized crop down": lambda: K.RandomResizedCrop((16, 11), align_corners=False),
    "resized crop resample": lambda: K.RandomResizedCrop(
        (33, 20), cropping_mode="resample", align_corners=False
    ),
    "resized crop nearest": lambda: K.RandomResizedCrop((31, 40), resample="nearest"),
    "resize up": lambda: K.Resize((50, 61)),
    "resize half pixel": lambda: K.Resize((20, 71), align_corners=False),
    "resize nearest": lambda: K.Resize((50, 41), resample="nearest"),
    "resize short": lambda: K.Resize(30),
    "resize long": lambda: K.LongestMaxSize(30),
    "hflip": lambda: K.RandomHorizontalFlip(),
    "vflip": lambda: K.RandomVerticalFlip(same_on_batch=True),
    "rotation": lambda: K.RandomRotation(45.0),
    "rotation nearest": lambda: K.RandomRotation((10.0, 80.0), "nearest", p=1.0),
    "affine zeros": lambda: K.RandomAffine(30.0, (0.2, 0.1), (0.7, 1.3), 10.0),
    "affine border": lambda: K.RandomAffine(
        30.0, scale=(0.5, 0.9, 1.0, 1.2), padding_mode="border", p=1.0
    ),
    "affine reflection": lambda: K.RandomAffine(
        30.0, (0.3, 0.3), padding_mode="reflection", align_corners=True, p=1.0
    ),
    "affine reflection edges": lambda: K.RandomAffine(
        30.0, (0.3, 0.3), padding_mode="reflection", p=1.0
    ),
    "affine fill": lambda: K.RandomAffine(
        30.0, shear=(-10.0, 10.0, -5.0, 5.0), padding_mode="fill", fill_value=0.4
    ),
    "blur": lambda: K.RandomGaussianBlur((7, 5), (0.1, 2.0)),
    "blur constant": lambda: K.RandomGaussianBlur((3, 3), (0.1, 2.0), "constant"),
    "blur replicate": lambda: K.RandomGaussianBlur(15, (0.5, 3.0), "replicate"),
    "blur circular": lambda: K.RandomGaussianBlur((9, 11), (0.5, 3.0), "circular"),
    "normalize": lambda: K.Normalize(MEAN, STD),
    "normalize sometimes": lambda: K.Normalize(0.4, 0.3, p=0.5),
    "denormalize": lambda: K.Denormalize(MEAN, STD),
    "jitter": lambda: K.ColorJitter(0.4, 0.4, 0.4, 0.2, p=0.8),
    "jitter in order": lambda: K.ColorJitter(
        0.5, (0.3, 2.0), (0.0, 3.0), 0.5, order=(3, 1, 0, 2)
    ),
    "jitter without mean": lambda: K.ColorJitter(0.3, 0.0, 0.5, 0.1),
    "jitter same": lambda: K.ColorJitter(0.3, 0.3, same_on_batch=True),
    "jiggle": lambda: K.ColorJiggle(0.3, 0.3, 0.6, 0.2, p=0.7),
    "jiggle in order": lambda: K.ColorJiggle(0.3, 0.5, (0.0, 4.0), 0.5, order=(2, 3)),
    "grayscale": lambda: K.RandomGrayscale(p=0.5),
    "grayscale weighted": lambda: K.RandomGrayscale(
        torch.tensor([0.6, 0.1, 0.5]), p=1.0
    ),
    "erasing": lambda: K.RandomErasing((0.05, 0.5)),
    "erasing tall": lambda: K.RandomErasing(
        (0.1, 0.2), (1.5, 3.0), 0.7, p=1.0, same_on_batch=True
    ),
}

CHAINS: dict[str, tuple[str, ...]] = {
    "seed": ("crop", "resize up", "rotation", "blur", "normalize"),
    "imagenet": ("resized crop up", "hflip", "normalize"),
    "cifar": ("crop padded", "hflip", "vflip", "normalize"),
    "flip between": ("resize up", "hflip", "vflip", "affine zeros", "blur constant"),
    "two warps": ("rotation", "affine fill", "denormalize"),
    "nearest chain": ("resize nearest", "hflip", "rotation nearest"),
    "warp then resize": ("affine zeros", "resize half pixel", "normalize"),
    "crop after warp": ("rotation", "center crop", "hflip", "resized crop up"),
    "three levels": ("resize up", "rotation", "resize half pixel", "blur"),
    "blur first": ("blur", "rotation", "normalize", "hflip"),
    "simclr": ("resized crop up", "hflip", "jitter", "grayscale", "blur", "normalize"),
    "seed jittered": ("crop", "resize up", "rotation", "jitter", "blur", "normalize"),
    "jitter first": ("jitter", "resized crop up", "hflip", "jiggle", "normalize"),
    "jitter last": ("crop padded", "blur", "erasing", "jitter", "grayscale weighted"),
    "two jitters": ("vflip", "jitter in order", "grayscale", "jitter", "denormalize"),
    "erased, blurred": ("rotation", "erasing", "blur circular", "normalize", "erasing"),
    "pad late": ("rotation", "crop padded", "normalize"),
}


def plan_of(*modules: nn.Module) -> Plan:
    """The plan of members that all fuse."""
    members = read_members(nn.Sequential(*modules))
    assert all(member.step for member in members), members
    return Plan(tuple(member.step for member in members if member.step))


def chain_of(names: tuple[str, ...]) -> nn.Sequential:
    """A chain of the members named."""
    return nn.Sequential(*(MEMBERS[name]() for name in names))


def gain_of(names: tuple[str, ...]) -> float:
    """How much a chain may multiply a difference that arises within it.

    A normalization divides by the deviation, and a jitter's factors are above 1.
    """
    raising = ("normalize", "jitter", "jiggle")
    return 4.0 ** sum(name.startswith(raising) for name in names)


def random_chains(max_size: int = 5) -> st.SearchStrategy[tuple[str, ...]]:
    """Any members in any order; the image (37, 53) is large enough for most crops."""
    return st.lists(
        st.sampled_from(sorted(MEMBERS)), min_size=1, max_size=max_size
    ).map(tuple)


def image_of(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Random pixels of any dtype that is accepted."""
    floats = torch.rand(shape, generator=torch.Generator().manual_seed(seed))
    if dtype == torch.uint8:
        return (floats * 255).round().to(dtype)
    if dtype == torch.uint16:
        return (floats * 65535).round().to(torch.int32).to(dtype)
    return floats.to(dtype)
