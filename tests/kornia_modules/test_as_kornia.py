"""Are values, labels and draws those of Kornia itself?"""

import copy
import itertools

import kornia.augmentation as K
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from gpuprefetch import StreamPrefetchLoader
from tests.kornia_modules.oracle import (
    CLOSE,
    as_kornia,
    blur,
    chain,
    crop,
    first,
    labelled_batch,
    rotation,
    sequential,
)
from tests.sources import Images, images

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize(
    "module",
    [
        crop,
        rotation,
        blur,
        K.RandomAffine(20.0, (0.1, 0.1), (0.8, 1.2), p=1.0),
        K.ColorJiggle(0.2, 0.2, 0.2, 0.1, p=1.0),
        K.RandomErasing(p=1.0),
        K.RandomResizedCrop((9, 9)),
        chain(),
        nn.Sequential(nn.Sequential(crop, rotation), blur),
        K.ImageSequential(crop, blur),
        K.ImageSequential(crop, blur, random_apply=1),
        sequential("input"),
    ],
    ids=lambda module: type(module).__name__,
)
def test_values_are_those_of_kornia_with_the_same_numbers(
    device: torch.device, module: nn.Module
) -> None:
    (batch,) = images(1, (6, 3, 20, 24))
    expected = as_kornia(module, batch, device=device)
    torch.testing.assert_close(first(batch, module, device=device), expected, **CLOSE)


def test_image_mask_boxes_and_keypoints_are_those_of_kornia(
    device: torch.device,
) -> None:
    batch = labelled_batch(6)
    module = sequential("input", "mask", "bbox", "keypoints")
    expected = as_kornia(module, *batch[:4], device=device)
    out = first((*batch, "rest"), module, inputs=(0, 1, 2, 3), device=device)
    assert out[4:] == (*batch[4:], "rest")
    for came, wanted in zip(out[:4], expected, strict=True):
        torch.testing.assert_close(came, wanted, **CLOSE)


def test_labels_follow_their_own_sample(device: torch.device) -> None:
    """Keypoint, middle of the box and middle of the mask mark one spot, per sample."""
    module = sequential("input", "mask", "bbox", "keypoints")
    out = first(labelled_batch(8), module, inputs=(0, 1, 2, 3), device=device)
    image, mask, boxes, points = (part.cpu() for part in out)
    assert len({tuple(point.flatten().tolist()) for point in points}) > 1
    torch.testing.assert_close(boxes.mean(2), points, atol=0.01, rtol=0)
    seen = 0
    for sample in range(8):
        rows, columns = mask[sample, 0].nonzero(as_tuple=True)
        on_border = not len(rows) or any(
            edge in (rows.min(), rows.max()) for edge in (0, 11)
        )
        if on_border or columns.min() == 0 or columns.max() == 9:
            continue
        seen += 1
        middle = torch.stack([columns.float().mean(), rows.float().mean()])
        torch.testing.assert_close(middle, points[sample, 0], atol=0.75, rtol=0)
        assert float(image[sample, 0, rows, columns].mean()) > 0.6
    assert seen


def test_a_dict_batch_takes_its_keys_through_inputs(device: torch.device) -> None:
    image, mask, *_ = labelled_batch(4)
    batch = {"name": ["a"] * 4, "seg": mask, "img": image}
    out = first(
        batch, sequential("input", "mask"), inputs=("img", "seg"), device=device
    )
    assert list(out) == ["name", "seg", "img"]
    assert out["name"] == ["a"] * 4
    assert out["img"].shape == (4, 3, 12, 10)
    assert out["seg"].shape == (4, 1, 12, 10)
    left, right = first(
        (image, mask), sequential("input", "mask"), inputs=(0, 1), device=device
    )
    assert torch.equal(out["img"], left)
    assert torch.equal(out["seg"], right)


# One draw per sample #


@pytest.mark.parametrize("module", [crop, rotation, blur], ids=["crop", "turn", "blur"])
def test_each_sample_has_its_own_draw_and_each_batch_its_own(
    device: torch.device, module: nn.Module
) -> None:
    image = torch.rand(1, 3, 20, 24).repeat(8, 1, 1, 1)
    loader = StreamPrefetchLoader([image] * 3, module, device=device, seed=1)
    batches = list(loader)
    for batch in batches:
        assert len(torch.unique(batch, dim=0)) == 8
    for left, right in itertools.combinations(batches, 2):
        assert not torch.equal(left, right)


def test_same_on_batch_is_one_draw_for_the_batch(device: torch.device) -> None:
    image = torch.rand(1, 3, 16, 16).repeat(4, 1, 1, 1)
    turn = K.RandomRotation(45.0, p=1.0, same_on_batch=True)
    assert len(torch.unique(first(image, turn, device=device), dim=0)) == 1


# With a DataLoader #


def test_uint8_photographs_from_workers_are_augmented(device: torch.device) -> None:
    source = DataLoader(Images(10, (3, 24, 24)), batch_size=4, num_workers=2)
    loader = StreamPrefetchLoader(source, chain(), device=device, seed=1)
    batches = list(loader)
    assert [tuple(x.shape) for x, _ in batches] == [(4, 3, 16, 16)] * 2 + [
        (2, 3, 16, 16)
    ]
    assert torch.cat([y for _, y in batches]).tolist() == list(range(10))
    again = StreamPrefetchLoader(source, chain(), device=device, seed=1)
    for (left, _), (right, _) in zip(batches, again, strict=True):
        assert torch.equal(left, right)


# The detector detects #


def test_meta_other_numbers_are_seen() -> None:
    (batch,) = images(1, (6, 3, 20, 24))
    wrong = copy.deepcopy(rotation)(batch)
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(first(batch, rotation), wrong, **CLOSE)
