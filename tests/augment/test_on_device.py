"""On a GPU: the kernel equals the torch applier, and nothing waits for the device."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator

import pytest
import torch
from chains import CHAINS, chain_of, image_of, plan_of

from gpuprefetch.augment.fusing import fuse
from gpuprefetch.augment.kernel import why_not
from gpuprefetch.augment.operator import to_unit_range
from gpuprefetch.augment.plan_kernel import PlanKernel
from gpuprefetch.augment.reference import apply_plan
from gpuprefetch.augment.sample import Sampler
from gpuprefetch.augment.variant import How

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available()
        and not os.environ.get("GPUPREFETCH_REQUIRE_CUDA"),
        reason="needs a CUDA device",
    ),
]
DEVICE = torch.device("cuda")
MODES = [("chained", "zeros"), ("single", "zeros"), ("single", "extend")]


@pytest.fixture
def _no_waiting() -> Iterator[None]:
    """Any operation of torch that waits for the device raises."""
    with warnings.catch_warnings():
        # torch says at the first use that this mode is a prototype.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def test_the_kernel_can_run() -> None:
    assert why_not(DEVICE) == ""


@pytest.mark.parametrize("mode", MODES, ids="-".join)
@pytest.mark.parametrize("name", CHAINS)
def test_kernel_equals_reference(name: str, mode: tuple[str, str]) -> None:
    plan = plan_of(*chain_of(CHAINS[name]))
    image = image_of((5, 3, 67, 93), torch.uint8).to(DEVICE)
    pack = Sampler(plan)(5, (67, 93), torch.Generator().manual_seed(1)).to(DEVICE)
    expected = apply_plan(
        plan, to_unit_range(image), pack, resampling=mode[0], outside=mode[1]
    )
    poison = torch.full_like(expected, float("nan"))
    del poison  # The result is written to its memory.
    actual = PlanKernel(plan)(image, pack, How(torch.float32, False, *mode))
    torch.testing.assert_close(actual, expected, rtol=0, atol=5e-4)


@pytest.mark.parametrize("name", ["seed", "imagenet"])
def test_the_whole_module_equals_its_own_result_on_the_cpu(name: str) -> None:
    fused = fuse(chain_of(CHAINS[name]))
    image = image_of((7, 3, 67, 93), torch.uint8)
    params = fused.sample(image.shape)
    expected = fused(image, params=params)
    actual = fused(image.to(DEVICE), params=params)
    torch.testing.assert_close(actual.cpu(), expected, rtol=0, atol=5e-4)


@pytest.mark.usefixtures("_no_waiting")
def test_a_call_never_waits_for_the_device() -> None:
    fused = fuse(chain_of(CHAINS["seed"]))
    image = torch.zeros((4, 3, 67, 93), dtype=torch.uint8, device=DEVICE)
    for _ in range(3):
        fused(image)


def test_a_batch_beyond_two_gigabytes() -> None:
    plan = plan_of(*chain_of(("hflip",)))
    image = torch.randint(
        0, 256, (3, 3, 16000, 16000), dtype=torch.uint8, device=DEVICE
    )
    pack = torch.tensor([[0.0], [1.0], [0.0]], device=DEVICE)
    out = PlanKernel(plan)(image, pack, How(torch.float16))
    expected = image[2, 2, -3:].flip(-1).float() / 255
    torch.testing.assert_close(out[2, 2, -3:].float(), expected, rtol=0, atol=1e-3)


def test_a_side_stream_may_be_current() -> None:
    fused = fuse(chain_of(CHAINS["seed"]))
    image = image_of((4, 3, 67, 93), torch.uint8).to(DEVICE)
    params = fused.sample(image.shape)
    expected = fused(image, params=params)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        actual = fused(image, params=params)
    torch.cuda.current_stream().wait_stream(side)
    torch.testing.assert_close(actual, expected)
