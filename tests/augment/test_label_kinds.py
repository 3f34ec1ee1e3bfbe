"""Labels of every dtype, rank and kind of container, as Kornia gives them back."""

from __future__ import annotations

import kornia.augmentation as K
import pytest
import torch
from chains import image_of
from torch import Tensor, nn

from gpuprefetch import StreamPrefetchLoader
from gpuprefetch.augment.fused import FusedAugmentation
from gpuprefetch.augment.fusing import fuse
from gpuprefetch.errors import BatchError, TransformError

IMAGE = image_of((4, 3, 20, 24), torch.float32)
BOX = torch.tensor([2.0, 3.0, 9.0, 11.0])
CORNERS = torch.tensor([[2.0, 3], [9, 3], [9, 11], [2, 11]])
LABELS = {
    "keypoints": torch.rand(4, 3, 2, generator=torch.Generator().manual_seed(1)) * 20,
    "bbox_xyxy": BOX.expand(4, 2, 4),
    "bbox_xywh": BOX.expand(4, 2, 4),
    "bbox": CORNERS.expand(4, 2, 4, 2),
}


def chain_for(key: str) -> K.AugmentationSequential:
    return K.AugmentationSequential(
        K.RandomRotation(40.0, p=1.0), K.RandomCrop((12, 12)), data_keys=["input", key]
    )


def moved(fused: FusedAugmentation, label: object) -> tuple[Tensor, object]:
    params = fused.sample(IMAGE.shape)
    return fused(IMAGE, label, params=params)[1], fused.to_kornia(params)


@pytest.mark.parametrize("key", LABELS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.float16, torch.float64])
def test_dtypes_are_kornias(key: str, dtype: torch.dtype) -> None:
    """Whole numbers become float32: a turned one is none."""
    chain, label = chain_for(key), LABELS[key].to(dtype)
    actual, params = moved(fuse(chain), label.clone())
    expected = chain(IMAGE, label.clone(), params=params)[1]
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=0, atol=0.02)


@pytest.mark.parametrize("key", LABELS)
def test_labels_of_one_image_keep_their_rank(key: str) -> None:
    label, fused = LABELS[key], fuse(chain_for(key))
    params = fused.sample(IMAGE[0].shape)
    one = fused(IMAGE[0], label[0], params=params)[1]
    many = fused(IMAGE[:1], label[:1], params=params)[1]
    assert one.shape == label[0].shape
    torch.testing.assert_close(one, many[0])


@pytest.mark.parametrize("key", LABELS)
@pytest.mark.parametrize("count", [3, 5])
def test_a_list_has_one_entry_for_each_image(key: str, count: int) -> None:
    with pytest.raises(TransformError, match=f"a list of {count} .* for 4 images"):
        fuse(chain_for(key))(IMAGE, [LABELS[key][0]] * count)


@pytest.mark.parametrize("key", LABELS)
def test_no_labels_at_all(key: str) -> None:
    fused, label = fuse(chain_for(key)), LABELS[key]
    assert fused(IMAGE, label[:, :0])[1].shape == label[:, :0].shape
    empty = [one[:0] for one in label]
    assert [one.shape for one in fused(IMAGE, empty)[1]] == [e.shape for e in empty]
    assert fused(IMAGE[:0], [])[1] == []


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float16])
@pytest.mark.parametrize("is_fused", [True, False])
def test_masks_keep_dtype_and_rank(dtype: torch.dtype, is_fused: bool) -> None:
    """Also where Kornia runs the whole, which gives (B, H, W) a channel."""
    member = K.RandomRotation(40.0) if is_fused else K.RandomPerspective(0.3)
    chain = K.AugmentationSequential(
        member,
        K.RandomCrop((20, 20), padding=2, padding_mode="reflect"),
        data_keys=["input", "mask"],
    )
    for shape in ((4, 20, 24), (4, 1, 20, 24), (4, 5, 20, 24)):
        mask = (torch.rand(shape) * 2).to(dtype)
        out = fuse(chain)(IMAGE, mask)[1]
        assert (out.dtype, out.shape) == (dtype, (*shape[:-2], 20, 20))


@pytest.mark.parametrize("key", ["keypoints", "bbox_xyxy"])
@pytest.mark.parametrize("member", [K.RandomHorizontalFlip(), K.RandomPerspective()])
def test_dicts_of_targets_are_refused_by_their_keys(
    key: str, member: nn.Module
) -> None:
    """Fused or not, in a loader and by itself."""
    chain = K.AugmentationSequential(member, data_keys=["input", key])
    targets = [{"boxes": torch.zeros(1, 4), "labels": torch.zeros(1)}] * 4
    told = rf"{key} .* is a list of dict, with the keys \['boxes', 'labels'\]"
    with pytest.raises(BatchError, match=told):
        fuse(chain)(IMAGE, targets)
    loader = StreamPrefetchLoader([(IMAGE, targets)], chain, inputs=(0, 1))
    with pytest.raises(BatchError, match=told):
        next(iter(loader))
    one = {"boxes": torch.zeros(4, 1, 4)}
    with pytest.raises(BatchError, match=r"is a dict, with the keys \['boxes'\]"):
        fuse(chain)(IMAGE, one)
