"""A launch gets the right arguments, without a GPU: the driver's call is a double."""

from __future__ import annotations

import ctypes
import functools

import pytest
import torch
from chains import CHAINS, chain_of, image_of, plan_of

from gpuprefetch.augment import plan_kernel
from gpuprefetch.augment.kernel import Loaded
from gpuprefetch.augment.plan_kernel import PlanKernel
from gpuprefetch.augment.sample import Sampler
from gpuprefetch.augment.variant import How

HOW = How(torch.float32)


class Driver:
    """Notes each launch: grid, threads, shared memory, stream, and the arguments."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launches: list[tuple[tuple[int, ...], list[int]]] = []
        self.loaded: list[str] = []
        self.status = 0
        monkeypatch.setattr(plan_kernel, "load_kernel", self._load)
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
        monkeypatch.setattr(
            torch._C, "_cuda_getCurrentRawStream", lambda _: 77, raising=False
        )

    def _load(self, header: str, device: torch.device, shared: int) -> Loaded:
        self.loaded.append(header)
        count = 14 if "HAS_MEAN 1" in header else 12
        return Loaded(functools.partial(self._launch, count), "function", None)

    def _launch(self, count: int, function: str, *rest: int) -> tuple[int]:
        assert function == "function"
        *config, pointers, extra = rest
        assert extra == 0
        addresses = (ctypes.c_void_p * count).from_address(pointers)
        values = [ctypes.c_longlong.from_address(one).value for one in addresses]
        self.launches.append((tuple(config), values))
        return (self.status,)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return Driver(monkeypatch)


def test_arguments_are_addresses_sizes_and_strides(driver: Driver) -> None:
    plan = plan_of(*chain_of(CHAINS["seed"]))
    planned = PlanKernel(plan)
    image = image_of((4, 3, 90, 70), torch.uint8)[:, :, 10:, 5:]
    pack = Sampler(plan)(4, (80, 65), None)
    out = planned(image, pack, HOW)
    assert out.shape == (4, 3, 50, 61)
    ((config, values),) = driver.launches
    assert config[2] == 4
    assert config[4:6] == (1, 1)
    assert config[-1] == 77
    assert values[:4] == [image.data_ptr(), out.data_ptr(), pack.data_ptr(), 0]
    assert values[4:] == [80, 65, 3 * 90 * 70, 90 * 70, 70, 1, 50, 61]
    for axis, (side, tiles) in enumerate(zip((61, 50), config[:2], strict=True)):
        assert 0 <= tiles * 64 - side < 64 or 0 <= tiles * 32 - side < 32, axis


def test_a_second_pass_reads_the_result_of_the_first(driver: Driver) -> None:
    plan = plan_of(*chain_of(CHAINS["blur first"]))
    image = image_of((2, 3, 40, 60), torch.uint8)
    out = PlanKernel(plan)(image, Sampler(plan)(2, (40, 60), None), HOW)
    (_, one), (_, two) = driver.launches[:2]
    assert one[0] == image.data_ptr()
    assert two[0] == one[1]
    assert driver.launches[-1][1][1] == out.data_ptr()


def test_sums_go_from_the_mean_launch_to_the_next(driver: Driver) -> None:
    plan = plan_of(*chain_of(CHAINS["seed jittered"]))
    image = image_of((3, 3, 40, 60), torch.uint8)
    out = PlanKernel(plan)(image, Sampler(plan)(3, (40, 60), None), HOW)
    (tiles, mean), (_, whole) = driver.launches
    assert mean[0] == whole[0] == image.data_ptr()
    assert mean[2] == whole[2]
    assert mean[4:12] == whole[4:12]
    assert whole[1] == out.data_ptr()
    # The sums lie where the mean launch wrote, as many as it has blocks per sample.
    assert whole[12:] == [mean[1], tiles[0] * tiles[1]]


def test_each_kind_of_image_is_prepared_once(driver: Driver) -> None:
    plan = plan_of(*chain_of(CHAINS["imagenet"]))
    planned = PlanKernel(plan)
    for size in (4, 4, 3, 4):
        image = image_of((size, 3, 40, 60), torch.uint8)
        planned(image, Sampler(plan)(size, (40, 60), None), HOW)
    assert len(driver.loaded) == 2
    assert [config[2] for config, _ in driver.launches] == [4, 4, 3, 4]


def test_nothing_is_launched_for_an_empty_batch(driver: Driver) -> None:
    plan = plan_of(*chain_of(CHAINS["imagenet"]))
    image = image_of((0, 3, 40, 60), torch.uint8)
    out = PlanKernel(plan)(image, Sampler(plan)(0, (40, 60), None), HOW)
    assert out.shape == (0, 3, 50, 61)
    assert driver.launches == []


def test_more_samples_than_the_grid_takes_go_in_parts(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_kernel, "_MAX_SAMPLES", 3)
    plan = plan_of(*chain_of(CHAINS["imagenet"]))
    image = image_of((7, 3, 40, 60), torch.uint8)
    out = PlanKernel(plan)(image, Sampler(plan)(7, (40, 60), None), HOW)
    assert out.shape == (7, 3, 50, 61)
    assert [config[2] for config, _ in driver.launches] == [3, 3, 1]


def test_images_that_the_kernel_cannot_read_have_no_call(driver: Driver) -> None:
    planned = PlanKernel(plan_of(*chain_of(CHAINS["imagenet"])))
    assert planned.find(torch.zeros(1, 3, 40, 60, dtype=torch.int64), HOW) is None
    huge = torch.empty((1, 3, 30000, 30000), dtype=torch.uint8, device="meta")
    assert planned.find(huge, HOW) is None


def test_a_failed_launch_is_an_error(driver: Driver) -> None:
    driver.status = 1
    plan = plan_of(*chain_of(CHAINS["imagenet"]))
    with pytest.raises(RuntimeError, match="could not be launched: 1"):
        PlanKernel(plan)(
            image_of((2, 3, 40, 60), torch.uint8),
            Sampler(plan)(2, (40, 60), None),
            HOW,
        )
