"""``fuse``: what runs fused, what is kept, and how labels and parameters travel."""

from __future__ import annotations

import copy
import pickle

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from chains import CHAINS, MEMBERS, chain_of, image_of
from torch import nn

from gpuprefetch.augment import operator
from gpuprefetch.augment.fusing import fuse
from gpuprefetch.errors import (
    BatchError,
    SettingError,
    SettingTypeError,
    TransformError,
)


@pytest.mark.parametrize("name", MEMBERS)
def test_parameters_survive_the_way_to_kornia_and_back(name: str) -> None:
    fused = fuse(MEMBERS[name]())
    params = fused.sample((6, 3, 40, 60))
    back = fused.from_kornia(fused.to_kornia(params), (6, 3, 40, 60))
    torch.testing.assert_close(back.flat, params.flat)


def test_kornias_own_draw_can_be_replayed() -> None:
    chain = K.AugmentationSequential(
        K.RandomResizedCrop((20, 20)),
        K.RandomAffine(20.0, (0.1, 0.1), (0.8, 1.2)),
        K.RandomHorizontalFlip(),
    )
    image = image_of((4, 3, 40, 60), torch.float32)
    expected = chain(image)
    actual = fuse(chain)(image, params=chain._params)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)


def test_members_without_a_step_run_between_the_fused_ones() -> None:
    chain = nn.Sequential(
        K.RandomRotation(20.0),
        K.RandomGamma((0.7, 1.3)),
        K.RandomInvert(),
        K.RandomHorizontalFlip(),
        K.Normalize(0.5, 0.2),
    )
    fused = fuse(chain)
    text = repr(fused)
    assert "(1) RandomGamma: as it is: there is no fused step for this class" in text
    assert "(0) RandomRotation: fused" in text
    assert not fused.is_fused
    assert fused.num_launches == 2
    image = image_of((4, 3, 20, 30), torch.uint8)
    params = fused.sample(image.shape)
    expected = image.float() / 255
    for member, one in zip(chain, fused.to_kornia(params), strict=True):
        expected = member(expected, params=one)
    torch.testing.assert_close(fused(image, params=params), expected, rtol=0, atol=5e-4)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (K.RandomCrop((9, 9), p=0.5), "p=0.5 the output's size depends"),
        (K.Resize((9, 9), antialias=True), "antialias"),
        (K.Resize((9, 9), resample="bicubic"), "bicubic"),
        (K.RandomGaussianBlur((17, 17), (1.0, 2.0)), "at most 15"),
        (K.Normalize(torch.rand(4, 3), torch.rand(4, 3)), "differ between samples"),
        (
            K.AugmentationSequential(K.RandomRotation(9.0), random_apply=1),
            "random_apply",
        ),
    ],
)
def test_the_repr_says_why_a_member_is_kept(module: nn.Module, reason: str) -> None:
    fused = fuse(module)
    assert reason in repr(fused)
    image = image_of((4, 3, 20, 30), torch.float32)
    params = fused.sample(image.shape)
    expected = module(image, params=fused.to_kornia(params))
    torch.testing.assert_close(fused(image, params=params), expected)


def test_a_subclass_of_the_users_is_not_taken_for_kornias_class() -> None:
    class Mine(K.RandomHorizontalFlip):
        pass

    assert "not one of Kornia's own classes" in repr(fuse(Mine()))


@pytest.mark.parametrize("resampling", ["chained", "single"])
def test_labels_follow_each_samples_own_map(resampling: str) -> None:
    keys = ["input", "mask", "keypoints", "bbox", "bbox_xyxy", "bbox_xywh", "label"]
    chain = K.AugmentationSequential(
        K.RandomResizedCrop((32, 24)),
        K.RandomHorizontalFlip(),
        K.ColorJitter(0.1),
        K.RandomAffine(20.0, (0.1, 0.1), p=0.7),
        K.RandomGaussianBlur((3, 3), (1.0, 2.0)),
        K.Normalize(0.5, 0.2),
        data_keys=keys,
    )
    image = image_of((5, 3, 40, 60), torch.float32)
    mask = torch.randint(0, 2**20, (5, 1, 40, 60))
    points = torch.rand(5, 7, 2) * 40
    box = torch.tensor([5.0, 6.0, 20.0, 30.0])
    corners = torch.tensor([[5.0, 6], [20, 6], [20, 30], [5, 30]]).expand(5, 2, 4, 2)
    labels = [
        mask,
        points,
        corners.clone(),
        box.expand(5, 3, 4).clone(),
        box.expand(5, 1, 4).clone(),
        torch.arange(5),
    ]
    fused = fuse(chain, resampling=resampling)
    params = fused.sample(image.shape)
    actual = fused(image, *labels, params=params)
    expected = chain(image, *labels, params=fused.to_kornia(params))
    for ours, theirs in zip(actual[1:], expected[1:], strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    if resampling == "chained":
        torch.testing.assert_close(actual[0], expected[0], rtol=0, atol=5e-4)


@pytest.mark.parametrize("name", [n for n in MEMBERS if "normalize" not in n])
def test_masks_equal_kornias(name: str) -> None:
    member = MEMBERS[name]()
    chain = K.AugmentationSequential(member, data_keys=["input", "mask"])
    image = image_of((4, 3, 37, 53), torch.float32)
    mask = torch.randint(0, 200, (4, 2, 37, 53)).float()
    fused = fuse(chain)
    params = fused.sample(image.shape)
    actual = fused(image, mask, params=params)[1]
    expected = chain(image, mask, params=fused.to_kornia(params))[1]
    # A place halfway between two pixels may be rounded to either; a corner-aligned crop
    # has many of those.
    limit = 0.04 if name == "resized crop resample" else 0.003
    assert (actual != expected).float().mean() < limit


def test_ranks_and_lists_of_labels_are_kept() -> None:
    chain = K.AugmentationSequential(
        K.RandomAffine(30.0), data_keys=["input", "mask", "bbox_xyxy"]
    )
    fused = fuse(chain)
    image = image_of((2, 3, 20, 30), torch.uint8)
    params = fused.sample(image.shape)
    boxes = [
        torch.tensor([[1.0, 2, 5, 6]]),
        torch.tensor([[3.0, 4, 9, 9]]).expand(3, 4),
    ]
    mask = torch.randint(0, 3, (2, 20, 30))
    _, moved, moved_boxes = fused(image, mask, boxes, params=params)
    assert moved.shape == mask.shape
    assert [one.shape for one in moved_boxes] == [(1, 4), (3, 4)]
    whole = fused(
        image, mask[:, None], torch.stack([b[:1] for b in boxes]), params=params
    )
    assert torch.equal(whole[1][:, 0], moved)
    torch.testing.assert_close(whole[2][1], moved_boxes[1][:1])
    assert fuse(K.RandomAffine(30.0))(image[0]).shape == (3, 20, 30)


def test_labels_through_a_kept_member_run_by_kornia() -> None:
    chain = K.AugmentationSequential(
        K.RandomPerspective(0.3, p=1.0),
        K.RandomHorizontalFlip(),
        data_keys=["input", "keypoints"],
    )
    fused = fuse(chain)
    image, points = image_of((2, 3, 20, 30), torch.float32), torch.rand(2, 4, 2) * 20
    params = fused.sample(image.shape)
    expected = chain(image, points, params=fused.to_kornia(params))
    actual = fused(image, points, params=params)
    torch.testing.assert_close(actual[0], expected[0])
    torch.testing.assert_close(actual[1], expected[1])


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.uint16, torch.float16, torch.bfloat16, torch.float32]
)
def test_integers_become_the_unit_range(dtype: torch.dtype) -> None:
    image = image_of((2, 3, 20, 30), dtype)
    out = fuse(K.RandomHorizontalFlip(p=0.0))(image)
    scale = {torch.uint8: 255.0, torch.uint16: 65535.0}.get(dtype, 1.0)
    torch.testing.assert_close(out, image.to(torch.float32) / scale)


def test_other_dtypes_are_named_in_the_error() -> None:
    with pytest.raises(BatchError, match=r"images of int64 cannot .* uint8, uint16"):
        fuse(K.RandomHorizontalFlip())(torch.zeros(1, 3, 4, 4, dtype=torch.int64))


def test_dtype_and_memory_format_are_as_set() -> None:
    fused = fuse(
        chain_of(CHAINS["imagenet"]),
        dtype=torch.bfloat16,
        memory_format=torch.channels_last,
    )
    out = fused(image_of((2, 3, 40, 60), torch.uint8))
    assert out.dtype == torch.bfloat16
    assert out.is_contiguous(memory_format=torch.channels_last)


def test_settings_are_checked() -> None:
    flip = K.RandomHorizontalFlip()
    with pytest.raises(SettingTypeError, match="got Linear"):
        fuse(nn.Linear(2, 2))
    with pytest.raises(SettingError, match="resampling must be one of 'chained'"):
        fuse(flip, resampling="double")
    with pytest.raises(SettingError, match=r"dtype must be one of .* got torch.int32"):
        fuse(flip, dtype=torch.int32)


def test_parameters_for_another_shape_are_refused() -> None:
    fused = fuse(K.RandomRotation(9.0))
    with pytest.raises(TransformError, match=r"\(2, 3, 8, 8\).*\(4, 3, 8, 8\)"):
        fused(torch.rand(4, 3, 8, 8), params=fused.sample((2, 3, 8, 8)))
    chain = K.AugmentationSequential(K.RandomRotation(9.0), data_keys=["input", "mask"])
    with pytest.raises(TransformError, match=r"1 arguments .* data_keys"):
        fuse(chain)(torch.rand(4, 3, 8, 8))


def test_a_fused_module_can_be_sent_to_another_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fused = fuse(chain_of(CHAINS["seed"]), resampling="single")
    sent = pickle.dumps(fused)
    monkeypatch.setattr(operator, "_plans", {})
    images = image_of((2, 3, 37, 53), torch.uint8)
    received = pickle.loads(sent)
    params = received.sample(images.shape)
    torch.testing.assert_close(
        received(images, params=params), copy.deepcopy(fused)(images, params=params)
    )


def test_masks_are_erased_too() -> None:
    """RandomErasing is an intensity member, but not for masks."""
    chain = K.AugmentationSequential(
        K.RandomHorizontalFlip(p=1.0),
        K.RandomErasing(p=1.0),
        data_keys=["input", "mask"],
    )
    fused = fuse(chain)
    image, mask = image_of((2, 3, 20, 30), torch.float32), torch.ones(2, 1, 20, 30)
    params = fused.sample(image.shape)
    expected = chain(image, mask, params=fused.to_kornia(params))
    assert fused.is_fused
    torch.testing.assert_close(fused(image, mask, params=params)[1], expected[1])
    assert expected[1].min() == 0


def test_mask_settings_of_the_container_count() -> None:
    chain = K.AugmentationSequential(
        K.RandomRotation(30.0, p=1.0),
        data_keys=["input", "mask"],
        extra_args={"mask": {"resample": "bilinear", "align_corners": None}},
    )
    assert "extra_args say how labels are moved" in repr(fuse(chain))


def test_the_users_module_is_not_touched() -> None:
    chain = chain_of(CHAINS["seed"])
    before = copy.deepcopy(chain).state_dict()
    fused = fuse(chain)
    fused(image_of((2, 3, 37, 53), torch.uint8))
    assert chain.state_dict().keys() == before.keys()
    assert chain[0]._params == {}
    assert list(fused.parameters()) == []


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (
            torch.zeros(2, 3, 8, 8, dtype=torch.float64),
            r"of float64 .*Accepted are uint8.*float32.*Pass images\.float\(\)\.$",
        ),
        (
            torch.zeros(2, 3, 8, 8, dtype=torch.int64),
            r"images of int64 .*Accepted are uint8.*float32.*Pass images\.to\(torch\."
            r"uint8\) if they hold 0 to 255, or images\.float\(\) scaled",
        ),
        (np.zeros((2, 3, 8, 8)), r"an image is an ndarray; .*torch\.from_numpy"),
        ([1], r"an image is a list; pass a tensor \(B, C, H, W\) or \(C, H, W\)\.$"),
        (torch.zeros(3), r"an image is a Tensor with 1 dimensions; pass a tensor"),
    ],
    ids=["float64", "int64", "array", "list", "vector"],
)
def test_an_image_that_is_not_taken_is_told_with_the_remedy(
    image: object, message: str
) -> None:
    with pytest.raises(BatchError, match=message):
        fuse(K.RandomHorizontalFlip())(image)
