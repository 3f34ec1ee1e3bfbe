"""The three appliers compute one function: Kornia, plain torch, the kernel's source."""

from __future__ import annotations

import kornia.augmentation as K
import pytest
import torch
from chains import CHAINS, MEMBERS, chain_of, gain_of, image_of, plan_of, random_chains
from cpu_kernel import run_plan, run_ragged, share_staged
from hypothesis import HealthCheck, assume, given, settings
from torch import Tensor, nn

from gpuprefetch.augment.fusing import fuse
from gpuprefetch.augment.operator import to_unit_range
from gpuprefetch.augment.plan import Plan
from gpuprefetch.augment.reference import apply_plan
from gpuprefetch.augment.sample import Sampler
from gpuprefetch.augment.variant import Tile
from gpuprefetch.errors import ImageSizeError

SIZE = (37, 53)
MODES = [("chained", "zeros"), ("single", "zeros"), ("single", "extend")]


def assert_close(actual: Tensor, expected: Tensor, atol: float = 1e-4) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


def kornia_result(
    chain: nn.Sequential, image: Tensor, seed: int
) -> tuple[Tensor, Tensor]:
    """Kornia's result and the torch applier's, for the same parameters."""
    fused = fuse(chain)
    generator = torch.Generator().manual_seed(seed)
    params = fused.sample(image.shape, generator)
    expected = image
    for member, one in zip(chain, fused.to_kornia(params), strict=True):
        expected = member(expected, params=one)
    return fused(image, params=params), expected


def compare_kernel(
    plan: Plan,
    image: Tensor,
    *,
    resampling: str = "chained",
    outside: str = "zeros",
    tile: Tile | None = None,
    dtype: torch.dtype = torch.float32,
    is_channels_last: bool = False,
    atol: float = 1e-4,
) -> None:
    """The kernel's source on the CPU against the torch applier."""
    generator = torch.Generator().manual_seed(1)
    pack = Sampler(plan)(image.shape[0], tuple(image.shape[-2:]), generator)
    expected = apply_plan(
        plan, to_unit_range(image), pack, resampling=resampling, outside=outside
    )
    actual = run_plan(
        plan,
        image,
        pack,
        dtype=dtype,
        is_channels_last=is_channels_last,
        tile=tile,
        resampling=resampling,
        outside=outside,
    )
    assert actual.dtype == dtype
    assert_close(actual.float(), expected, atol)


@pytest.mark.parametrize("name", MEMBERS)
def test_every_member_equals_kornia(name: str) -> None:
    image = image_of((5, 3, *SIZE), torch.float32)
    for seed in range(3):
        actual, expected = kornia_result(chain_of((name,)), image, seed)
        # Normalize divides by 0.2 and so multiplies what lies below 2e-5 by 5.
        assert_close(actual, expected)


@pytest.mark.parametrize("name", CHAINS)
def test_common_chains_equal_kornia(name: str) -> None:
    image = image_of((5, 3, *SIZE), torch.float32)
    actual, expected = kornia_result(chain_of(CHAINS[name]), image, 0)
    assert_close(actual, expected, 3e-4 if "normalize" in CHAINS[name] else 1e-4)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(random_chains())
def test_random_chains_equal_kornia(names: tuple[str, ...]) -> None:
    # Nearest reads may fall on the other side of a tie after float rounding.
    assume(not any("nearest" in name for name in names))
    image = image_of((3, 3, *SIZE), torch.float32)
    try:
        actual, expected = kornia_result(chain_of(names), image, 1)
    except ImageSizeError:
        assume(False)
    except (RuntimeError, ValueError) as error:
        assume("adding" not in str(error) and "must be" not in str(error))
        raise
    assert_close(actual, expected, 1e-4 * gain_of(names))


@pytest.mark.parametrize("mode", MODES, ids="-".join)
@pytest.mark.parametrize("name", CHAINS)
def test_kernel_equals_reference(name: str, mode: tuple[str, str]) -> None:
    image = image_of((3, 3, *SIZE), torch.uint8)
    compare_kernel(
        plan_of(*chain_of(CHAINS[name])), image, resampling=mode[0], outside=mode[1]
    )


@pytest.mark.parametrize("name", MEMBERS)
def test_kernel_does_every_member(name: str) -> None:
    compare_kernel(plan_of(MEMBERS[name]()), image_of((3, 3, *SIZE), torch.uint8))


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(random_chains(4))
def test_kernel_does_random_chains(names: tuple[str, ...]) -> None:
    assume(not any("nearest" in name for name in names))
    plan = plan_of(*chain_of(names))
    try:
        Sampler(plan)(1, SIZE, None)
        apply_plan(plan, torch.rand(1, 3, *SIZE), Sampler(plan)(1, SIZE, None))
    except (ImageSizeError, RuntimeError):
        assume(False)
    image = image_of((2, 3, *SIZE), torch.uint8)
    compare_kernel(plan, image, atol=1e-4 * gain_of(names))


@pytest.mark.parametrize("channels", [1, 2, 4, 5, 12])
def test_kernel_takes_any_number_of_channels(channels: int) -> None:
    chain = chain_of(("crop", "resize up", "rotation", "blur"))
    image = image_of((2, channels, *SIZE), torch.uint8)
    compare_kernel(plan_of(*chain), image)
    compare_kernel(plan_of(*chain), image, is_channels_last=True)


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.uint16, torch.float16, torch.bfloat16, torch.float32]
)
def test_kernel_reads_every_dtype_in_any_layout(dtype: torch.dtype) -> None:
    plan = plan_of(*chain_of(("crop padded", "resize up", "rotation", "blur")))
    image = image_of((2, 3, *SIZE), dtype)
    compare_kernel(plan, image)
    strided = image_of((3, 2, 3, 2 * SIZE[0], SIZE[1] + 5), dtype)[1, :, :, ::2, 3:-2]
    compare_kernel(plan, strided)
    last = image.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    compare_kernel(plan, last)


@pytest.mark.parametrize("is_channels_last", [False, True])
@pytest.mark.parametrize(
    ("dtype", "atol"), [(torch.float16, 1e-2), (torch.bfloat16, 5e-2)]
)
@pytest.mark.parametrize("name", ["seed", "imagenet"])
def test_kernel_writes_every_dtype_in_both_layouts(
    name: str, dtype: torch.dtype, atol: float, is_channels_last: bool
) -> None:
    compare_kernel(
        plan_of(*chain_of(CHAINS[name])),
        image_of((2, 3, *SIZE), torch.uint8),
        dtype=dtype,
        is_channels_last=is_channels_last,
        atol=atol,
    )


@pytest.mark.parametrize(
    "tile",
    [
        Tile(x=32, y=32, threads=96),
        Tile(x=64, y=64, threads=512),
        Tile(strip=16, threads=128),
        Tile(stages_floats=True),
        Tile(stage_texels=40),
    ],
    ids=str,
)
def test_tiles_do_not_change_the_result(tile: Tile) -> None:
    """A stage of 40 texels is too small: every tile is read from device memory."""
    image = image_of((2, 3, *SIZE), torch.uint8)
    compare_kernel(plan_of(*chain_of(CHAINS["seed"])), image, tile=tile)
    compare_kernel(plan_of(*chain_of(CHAINS["two warps"])), image, tile=tile)


@pytest.mark.parametrize("size", [(1, 1), (2, 3), (3, 2), (9, 130), (130, 9)])
def test_kernel_does_small_and_thin_images(size: tuple[int, int]) -> None:
    chain = chain_of(("hflip", "resize up", "rotation", "blur constant"))
    compare_kernel(plan_of(*chain), image_of((2, 3, *size), torch.uint8))


@pytest.mark.parametrize("batch", [0, 1, 257])
def test_any_batch_size(batch: int) -> None:
    plan = plan_of(*chain_of(("crop", "rotation")))
    compare_kernel(plan, image_of((batch, 1, *SIZE), torch.uint8))
    images = image_of((batch, 1, *SIZE), torch.uint8)
    assert fuse(chain_of(("crop", "rotation")))(images).shape == (batch, 1, 20, 30)


def test_samples_may_lie_anywhere_and_have_any_size() -> None:
    """Each sample has its own address, size and strides."""
    chain = chain_of(("hflip", "resize up", "rotation", "blur", "normalize"))
    plan = plan_of(*chain)
    sizes = [(37, 53), (11, 90), (128, 30)]
    images = [
        image_of((*size, 3), torch.uint8, seed).permute(2, 0, 1)
        for seed, size in enumerate(sizes)
    ]
    pack = Sampler(plan)(3, SIZE, torch.Generator().manual_seed(1))
    actual = run_ragged(plan, images, pack, Tile())
    for index, image in enumerate(images):
        expected = apply_plan(plan, to_unit_range(image[None]), pack[index : index + 1])
        assert_close(actual[index : index + 1], expected, 3e-4)


def test_common_chains_are_read_from_shared_memory() -> None:
    """At every angle; a stage that is a little too small would be right but slow."""
    blur = K.RandomGaussianBlur((7, 7), (0.1, 2.0))
    turn = K.RandomRotation(180.0, p=1.0)
    seed = plan_of(K.RandomCrop((128, 128)), K.Resize((256, 256)), turn, blur)
    assert share_staged(seed, 40, (256, 256)) == 1
    assert share_staged(plan_of(turn), 40, (224, 224)) == 1
    assert share_staged(plan_of(turn, blur), 40, (224, 224)) == 1
    affine = K.RandomAffine(180.0, (0.1, 0.1), (0.8, 1.2), p=1.0)
    assert share_staged(plan_of(affine), 40, (224, 224)) == 1
    crops = plan_of(K.RandomResizedCrop((224, 224)), K.RandomHorizontalFlip())
    assert share_staged(crops, 40, (256, 256)) == 1
    assert share_staged(crops, 40, (500, 500)) > 0.9
