"""Which types, sizes and numbers of inputs does a Kornia module take, and how?"""

import copy
from collections.abc import Callable

import kornia.augmentation as K
import pytest
import torch
from torch import nn

from gpuprefetch import (
    BatchError,
    ImageSizeError,
    SettingError,
    StreamPrefetchLoader,
    TransformError,
)
from gpuprefetch.augment import fuse
from tests.kornia_modules.oracle import (
    blur,
    chain,
    crop,
    first,
    labelled_batch,
    rotation,
    sequential,
)

pytestmark = pytest.mark.timeout(60)


# Types #


@pytest.mark.parametrize(
    ("dtype", "full"), [(torch.uint8, 255), (torch.uint16, 65535)], ids=str
)
def test_integer_images_are_scaled_to_one(
    device: torch.device, dtype: torch.dtype, full: int
) -> None:
    x = torch.tensor([0, full // 3, full]).view(1, 1, 1, 3).expand(2, 3, 6, 3)
    out = first(x.to(dtype), K.RandomHorizontalFlip(p=0.0), device=device)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.cpu(), (x / full).float())


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
)
def test_float_images_keep_type_and_range(
    device: torch.device, dtype: torch.dtype
) -> None:
    x = torch.full((2, 3, 8, 8), 200.0, dtype=dtype)
    out = first(x, K.RandomHorizontalFlip(p=1.0), device=device)
    assert out.dtype == dtype
    assert set(out.unique().tolist()) == {200.0}
    chained = first(torch.rand(2, 3, 20, 20).to(dtype), nn.Sequential(crop, rotation))
    assert chained.dtype == dtype


@pytest.mark.parametrize(
    "dtype", [torch.int16, torch.int32, torch.int64, torch.bool, torch.int8], ids=str
)
def test_other_image_types_are_refused_by_name(
    device: torch.device, dtype: torch.dtype
) -> None:
    x = torch.ones(2, 3, 20, 20, dtype=dtype)
    with pytest.raises(
        BatchError, match=rf"{dtype}.*Accepted are uint8.*uint16.*float"
    ):
        first(x, crop, device=device)


def test_masks_and_labels_are_not_scaled(device: torch.device) -> None:
    x = torch.full((2, 3, 16, 16), 255, dtype=torch.uint8)
    mask = torch.full((2, 1, 16, 16), 200, dtype=torch.uint8)
    batch = (x, mask, torch.tensor([7, 8]))
    module = K.AugmentationSequential(
        K.RandomHorizontalFlip(p=1.0), data_keys=["input", "mask"]
    )
    image, labels, classes = first(batch, module, inputs=(0, 1), device=device)
    assert set(image.unique().tolist()) == {1.0}
    assert labels.dtype == torch.uint8
    assert set(labels.unique().tolist()) == {200}
    assert classes.tolist() == [7, 8]


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int32, torch.uint8, torch.bool, torch.float32], ids=str
)
@pytest.mark.parametrize("shape", [(4, 16, 16), (4, 1, 16, 16)])
def test_masks_keep_rank_type_and_values(
    device: torch.device, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    mask = torch.zeros(shape, dtype=dtype)
    mask[..., 4:12, 4:12] = 1
    module = sequential("input", "mask")
    _, out = first(
        (torch.rand(4, 3, 16, 16), mask), module, inputs=(0, 1), device=device
    )
    assert out.shape == (*shape[:-2], 12, 10)
    assert out.dtype == dtype
    assert set(out.unique().tolist()) == {0, 1}


def test_masks_of_large_labels_keep_every_value(device: torch.device) -> None:
    """The largest odd label that Kornia takes: half floats would round it."""
    label = 2**24 - 1
    mask = torch.full((2, 16, 16), label, dtype=torch.int64)
    module = K.AugmentationSequential(
        K.RandomHorizontalFlip(p=1.0), data_keys=["input", "mask"]
    )
    _, out = first(
        (torch.rand(2, 3, 16, 16), mask), module, inputs=(0, 1), device=device
    )
    assert out.unique().tolist() == [label]


# Ranks, channels, sizes #


@pytest.mark.parametrize("module", [crop, chain()], ids=["one", "chain"])
def test_an_image_without_batch_comes_back_without_one(
    device: torch.device, module: nn.Module
) -> None:
    out = first(torch.rand(3, 20, 24), module, device=device)
    assert out.shape == (3, *((12, 10) if module is crop else (16, 16)))


def test_image_and_mask_without_batch_come_back_without_one(
    device: torch.device,
) -> None:
    batch = (torch.rand(3, 16, 16), torch.ones(16, 16, dtype=torch.int64))
    image, mask = first(
        batch, sequential("input", "mask"), inputs=(0, 1), device=device
    )
    assert image.shape == (3, 12, 10)
    assert mask.shape == (12, 10)
    assert mask.dtype == torch.int64


@pytest.mark.parametrize("channels", [1, 3, 4, 12])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_any_channels_and_batch_sizes(
    device: torch.device, channels: int, size: int
) -> None:
    x = torch.rand(size, channels, 20, 20)
    module = nn.Sequential(crop, rotation, blur)
    assert first(x, module, device=device).shape == (size, channels, 12, 10)


def test_an_empty_batch_is_as_kornia_has_it(device: torch.device) -> None:
    x = torch.rand(0, 3, 20, 20)
    try:
        expected = copy.deepcopy(rotation)(x)
    except Exception as error:
        with pytest.raises(type(error)):
            first(x, rotation, device=device)
    else:
        assert first(x, rotation, device=device).shape == expected.shape


def test_channels_last_is_accepted(device: torch.device) -> None:
    x = torch.rand(4, 3, 20, 20)
    expected = first(x, chain(), device=device)
    out = first(x.to(memory_format=torch.channels_last), chain(), device=device)
    torch.testing.assert_close(out, expected)


def test_a_last_smaller_batch_and_other_sizes_pass(device: torch.device) -> None:
    source = [torch.rand(n, 3, s, s) for n, s in ((4, 20), (4, 31), (1, 12), (3, 20))]
    loader = StreamPrefetchLoader(source, chain(), device=device)
    assert [len(x) for x in loader] == [4, 4, 1, 3]


@pytest.mark.parametrize(
    "module",
    [
        K.RandomCrop((24, 10)),
        K.RandomCrop((10, 24)),
        nn.Sequential(blur, K.RandomCrop((24, 24))),
        K.AugmentationSequential(K.RandomCrop((24, 24)), data_keys=["input"]),
        K.CenterCrop(24),
    ],
    ids=["high", "wide", "chain", "container", "center"],
)
def test_a_crop_beyond_the_image_names_both_sizes(
    device: torch.device, module: nn.Module
) -> None:
    with pytest.raises(ImageSizeError, match=r"24.*larger than.*20.*16.*smaller crop"):
        first(torch.rand(2, 3, 20, 16), module, device=device)


def test_a_crop_after_enlarging_fits(device: torch.device) -> None:
    module = nn.Sequential(K.Resize((40, 40)), K.RandomCrop((24, 24)))
    assert first(torch.rand(2, 3, 9, 9), module, device=device).shape[-1] == 24
    padded = K.RandomCrop((12, 12), padding=4)
    assert first(torch.rand(2, 3, 8, 8), padded, device=device).shape[-1] == 12


def test_a_crop_that_was_larger_than_one_batch_serves_the_next(
    device: torch.device,
) -> None:
    module = K.RandomCrop((12, 12))
    with pytest.raises(ImageSizeError):
        first(torch.rand(1, 3, 8, 8), module, device=device)
    assert first(torch.rand(1, 3, 16, 16), module, device=device).shape[-1] == 12


# The number of inputs #


def test_too_few_inputs_for_the_data_keys_are_refused(device: torch.device) -> None:
    batch = (torch.rand(2, 3, 16, 16), torch.zeros(2, 1, 16, 16))
    with pytest.raises(TransformError, match=r"takes 2 inputs .*mask.*got 1.*inputs="):
        first(batch, sequential("input", "mask"), device=device)


def test_two_inputs_for_one_image_are_refused(device: torch.device) -> None:
    batch = (torch.rand(2, 3, 20, 20), torch.rand(2, 3, 20, 20))
    with pytest.raises(TransformError, match=r"takes 1 input .*got 2.*data_keys"):
        first(batch, crop, inputs=(0, 1), device=device)


def test_one_data_key_named_by_a_tuple_gives_one_result(device: torch.device) -> None:
    batch = (torch.rand(2, 3, 20, 20), "label")
    out = first(batch, crop, inputs=(0,), device=device)
    assert out[0].shape == (2, 3, 12, 10)
    assert out[1] == "label"


@pytest.mark.parametrize(
    "module",
    [crop, chain(), K.ImageSequential(crop), sequential("input", "mask"), fuse(crop)],
    ids=lambda module: type(module).__name__,
)
def test_a_module_that_takes_images_is_no_batch_transform(module: nn.Module) -> None:
    with pytest.raises(
        SettingError,
        match=r"batch_transform gets the whole batch.*"
        rf"{type(module).__name__} takes images.*Pass it as transform=.*inputs=",
    ):
        StreamPrefetchLoader([labelled_batch(3)[:2]], batch_transform=module)


@pytest.mark.parametrize("wrap", [lambda m: m, nn.Sequential, fuse])
def test_a_dict_with_suffixes_works_without_data_keys(
    device: torch.device, wrap: Callable[[nn.Module], nn.Module]
) -> None:
    image, mask, *_ = labelled_batch(3)
    module = wrap(K.AugmentationSequential(K.RandomCrop((12, 10)), data_keys=None))
    batch = {"image": (image * 255).to(torch.uint8), "mask": mask, "mask_2": mask}
    loader = StreamPrefetchLoader([batch], batch_transform=module, device=device)
    out = next(iter(loader))
    assert {key: value.shape[-2:] for key, value in out.items()} == dict.fromkeys(
        batch, (12, 10)
    )
    assert out["image"].dtype == torch.float32
    assert float(out["image"].max()) == 1.0
    assert torch.equal(out["mask"], out["mask_2"])
