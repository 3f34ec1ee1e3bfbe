"""Where the kernel reads: far strides, shared memory of a view, nothing beyond it.

The source of the kernel runs on the CPU here, so a wrong address is a wrong value or a
crash, and what lies around an image can be poisoned.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from chains import CHAINS, MEMBERS, chain_of, image_of, plan_of
from cpu_kernel import run_plan
from test_appliers import compare_kernel
from torch import Tensor

from gpuprefetch.augment import plan_kernel
from gpuprefetch.augment.sample import Sampler

SIZE = (37, 53)
FAR = 2**31


def sparse(path: Path, length: int) -> Tensor:
    """Memory of which only the pages that are touched exist."""
    return torch.from_numpy(np.memmap(path / "far", np.uint8, "w+", shape=(length,)))


@pytest.mark.parametrize(
    "strides",
    [
        (FAR + 12345, SIZE[0] * SIZE[1], SIZE[1], 1),  # Samples beyond 2^31 elements.
        (FAR - 1, 2**30 - 4096, SIZE[1], 1),  # Channels that end just below.
        (7, 2**30 - 2**26, 2**20, 64),  # Rows and columns far apart.
    ],
)
@pytest.mark.parametrize("name", ["seed", "imagenet", "cifar"])
def test_images_far_apart(tmp_path: Path, strides: tuple[int, ...], name: str) -> None:
    shape = (2, 3, *SIZE)
    reach = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    image = sparse(tmp_path, reach + 1).as_strided(shape, strides)
    image.copy_(image_of(shape, torch.uint8))
    assert plan_kernel._fits_32_bits(image)
    compare_kernel(plan_of(*chain_of(CHAINS[name])), image)


def test_an_image_that_32_bits_cannot_address_is_left_to_torch() -> None:
    for strides, fits in (((0, 2**30 - 1, 1, 0), True), ((0, 2**30, 1, 0), False)):
        view = torch.empty_strided((1, 3, 1, 1), strides, device="meta")
        assert plan_kernel._fits_32_bits(view) is fits


@pytest.mark.parametrize("name", MEMBERS)
def test_nothing_around_the_image_is_read(name: str) -> None:
    """NaN, even times a weight of 0, would be seen."""
    plan = plan_of(MEMBERS[name]())
    around = torch.full((4, 5, SIZE[0] + 40, SIZE[1] + 40), float("nan"))
    image = around[:, 1:4, 20:-20, 20:-20]
    image.copy_(image_of(tuple(image.shape), torch.float32))
    pack = Sampler(plan)(4, SIZE, torch.Generator().manual_seed(2))
    for how in ({}, {"resampling": "single"}):
        assert not run_plan(plan, image, pack, **how).isnan().any()


@pytest.mark.parametrize("view", ["expanded", "overlapping", "transposed", "stepped"])
def test_views_of_every_kind(view: str) -> None:
    base = image_of((2, 3, 80, 80), torch.uint8)
    image = {
        "expanded": lambda: base[:1, :1, :37, :53].expand(3, 3, 37, 53),
        "overlapping": lambda: base.as_strided((2, 3, 37, 53), (11, 5, 3, 2)),
        "transposed": lambda: base.permute(1, 0, 3, 2)[:, :, :53, :60],
        "stepped": lambda: base[:, :, ::2, 1::1],
    }[view]()
    for name in ("crop", "rotation", "blur"):
        compare_kernel(plan_of(MEMBERS[name]()), image)
