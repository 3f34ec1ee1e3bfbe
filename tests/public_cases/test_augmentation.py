"""Do images and labels come out as an augmentation promises?"""

from typing import Any

import kornia.augmentation as K
import pytest
import torch
from torch import nn

from gpuprefetch import StreamPrefetchLoader, TransformError
from tests.public_cases.chains import crop_rotate_blur

pytestmark = pytest.mark.timeout(30)


@pytest.mark.parametrize(
    ("augmentation", "distinct"),
    [
        (K.RandomCrop((16, 16)), 8),
        (K.RandomRotation(45.0, p=1.0), 8),
        (K.RandomGaussianBlur((5, 5), (0.1, 3.0), p=1.0), 8),
        (K.RandomRotation(45.0, p=1.0, same_on_batch=True), 1),
    ],
    ids=["crop", "rotation", "blur", "same-on-batch"],
)
def test_d20_each_sample_has_its_own_draw(
    device: torch.device, augmentation: nn.Module, distinct: int
) -> None:
    """pytorch/vision#8484, #2929, GaTech-RL2/EgoVerse#651: one draw for a batch."""
    image = torch.arange(1024.0).reshape(1, 1, 32, 32).repeat(8, 1, 1, 1)
    loader = StreamPrefetchLoader([image] * 2, augmentation, device=device)
    first, second = loader
    assert len(torch.unique(first, dim=0)) == distinct
    assert not torch.equal(first, second)


@pytest.mark.parametrize(("value", "scaled"), [(255, 1.0), (128, 128 / 255), (0, 0.0)])
def test_d21_uint8_is_scaled_to_one(
    device: torch.device, value: int, scaled: float
) -> None:
    """kornia/kornia#523: uint8 images crashed the session."""
    x = torch.full((2, 3, 16, 16), value, dtype=torch.uint8)
    rotation = K.RandomRotation((0.0, 0.0), p=1.0)
    out = next(iter(StreamPrefetchLoader([x], transform=rotation, device=device)))
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, torch.full_like(out, scaled))


def test_d22_a_crop_larger_than_the_image_is_refused(device: torch.device) -> None:
    """kornia/kornia#4414: the image was silently enlarged."""
    x = torch.zeros(1, 1, 4, 4)
    loader = StreamPrefetchLoader([x], K.RandomCrop((8, 8)), device=device)
    with pytest.raises(ValueError, match=r"8, 8.*larger than.*4 x 4"):
        next(iter(loader))


def test_d22_padding_makes_room_for_the_crop(device: torch.device) -> None:
    """kornia/kornia#4414: ones of 4x8 in a padded crop of 6x6 sum to 24."""
    crop = K.RandomCrop((6, 6), pad_if_needed=True)
    loader = StreamPrefetchLoader([torch.ones(1, 1, 4, 8)], crop, device=device)
    out = next(iter(loader))
    assert out.shape == (1, 1, 6, 6)
    assert set(out.unique().tolist()) <= {0.0, 1.0}
    assert float(out.sum()) == 24


def image_and_mask() -> K.AugmentationSequential:
    return K.AugmentationSequential(
        K.RandomCrop((24, 24)),
        K.RandomRotation(45.0, p=1.0),
        K.RandomGaussianBlur((3, 3), (0.5, 2.0), p=1.0),
        data_keys=["input", "mask"],
    )


@pytest.mark.parametrize("how", ["inputs", "batch_transform"])
def test_d23_labels_get_no_invented_values(device: torch.device, how: str) -> None:
    """kornia/kornia#1676, #476: labels 0 and 3 became everything in between."""
    mask = torch.zeros(4, 1, 32, 32, dtype=torch.int64)
    mask[:, :, 8:24, 8:24] = 7
    mask[:, :, 12:20, 12:20] = 3
    batch, chain = (torch.rand(4, 3, 32, 32), mask), image_and_mask()
    loader = (
        StreamPrefetchLoader([batch], chain, inputs=(0, 1), device=device)
        if how == "inputs"
        else StreamPrefetchLoader(
            [batch], batch_transform=lambda b: chain(*b), device=device
        )
    )
    x, labels = next(iter(loader))
    assert x.shape == (4, 3, 24, 24)
    assert labels.shape == (4, 1, 24, 24)
    assert labels.dtype == torch.int64
    assert set(labels.unique().tolist()) == {0, 3, 7}


def test_d23_image_and_mask_turn_together(device: torch.device) -> None:
    """kornia/kornia#476: by 90 degrees, pixel (2, 5) of 8x8 goes to (2, 2)."""
    x, mask = torch.zeros(1, 1, 8, 8), torch.zeros(1, 1, 8, 8, dtype=torch.int64)
    x[0, 0, 2, 5], mask[0, 0, 2, 5] = 1.0, 9
    chain = K.AugmentationSequential(
        K.RandomRotation((90.0, 90.0), p=1.0), data_keys=["input", "mask"]
    )
    loader = StreamPrefetchLoader([(x, mask)], chain, inputs=(0, 1), device=device)
    out, labels = next(iter(loader))
    assert (out[0, 0] > 0.5).nonzero().tolist() == [[2, 2]]
    assert labels[0, 0].nonzero().tolist() == [[2, 2]]
    assert int(labels[0, 0, 2, 2]) == 9


@pytest.mark.parametrize("channels", [1, 3, 4, 12])
def test_d24_any_number_of_channels(device: torch.device, channels: int) -> None:
    """huggingface/pytorch-image-models#1123, #976: MNIST failed."""
    batch = torch.rand(2, channels, 16, 16)
    loader = StreamPrefetchLoader([batch], crop_rotate_blur(8), device=device)
    assert next(iter(loader)).shape == (2, channels, 8, 8)
    normalize = K.Normalize(torch.tensor(0.5), torch.tensor(0.25))
    ones = torch.ones(2, channels, 4, 4)
    out = next(iter(StreamPrefetchLoader([ones], normalize, device=device)))
    torch.testing.assert_close(out, torch.full_like(out, 2.0))


def test_d24_three_means_for_one_channel_name_both_lengths(
    device: torch.device,
) -> None:
    """huggingface/pytorch-image-models#976: mean and std were made for three."""
    three = K.Normalize(torch.full((3,), 0.5), torch.full((3,), 0.25))
    loader = StreamPrefetchLoader([torch.ones(2, 1, 4, 4)], three, device=device)
    with pytest.raises(ValueError, match=r"1.*3|3.*1"):
        next(iter(loader))


@pytest.mark.gpu
def test_d25_a_kornia_module_left_on_the_cpu_works_on_the_gpu() -> None:
    """kornia/kornia#3066, #3117, #4151: images came back on the CPU."""
    batch = (torch.rand(4, 3, 32, 32), torch.zeros(4, 1, 32, 32))
    chain = image_and_mask()
    for settings in (
        {"transform": chain, "inputs": (0, 1)},
        {"batch_transform": lambda b: chain(*b)},
    ):
        loader = StreamPrefetchLoader([batch] * 20, device="cuda", **settings)
        for x, mask in loader:
            assert x.device.type == mask.device.type == "cuda"


def test_d25_a_result_on_another_device_is_reported(
    other_device: torch.device,
) -> None:
    """kornia/kornia#3066: never passed on silently; the leaf is named."""

    def leave(batch: Any) -> Any:
        return batch["x"], {"y": torch.zeros(1, device="cpu")}

    loader = StreamPrefetchLoader(
        [{"x": torch.rand(1)}], batch_transform=leave, device=other_device
    )
    with pytest.raises(TransformError, match=r"batch\[1\]\['y'\].*cpu"):
        next(iter(loader))
