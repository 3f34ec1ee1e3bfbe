"""Does every member of Kornia's augmentation package work as a transform?

All public augmentations are looked up in the installed Kornia, so one that a new
release adds is tried as well. The oracle is Kornia itself, as in
``tests/kornia_modules``.
"""

import gc
from collections.abc import Callable
from typing import Any

import kornia.augmentation as K
import pytest
import torch
from torch import nn

from gpuprefetch import BatchError, StreamPrefetchLoader
from tests.kornia_modules.oracle import CLOSE, as_kornia, first
from tests.sources import images

pytestmark = pytest.mark.timeout(60)

HALF = torch.tensor(0.5)

# Arguments of those that cannot be made without.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "CenterCrop": {"size": (12, 10)},
    "Denormalize": {"mean": HALF, "std": HALF},
    "LongestMaxSize": {"max_size": 20},
    "Normalize": {"mean": HALF, "std": HALF},
    "PadTo": {"size": (30, 30)},
    "RandomAffine": {"degrees": 20.0},
    "RandomCrop": {"size": (12, 10)},
    "RandomFisheye": {
        "center_x": torch.tensor([-0.3, 0.3]),
        "center_y": torch.tensor([-0.3, 0.3]),
        "gamma": torch.tensor([0.9, 1.0]),
    },
    "RandomGaussianBlur": {"kernel_size": (3, 3), "sigma": (0.1, 2.0)},
    "RandomMosaic": {"output_size": (24, 24)},
    "RandomMotionBlur": {"kernel_size": 3, "angle": 35.0, "direction": 0.5},
    "RandomRain": {
        "number_of_drops": (5, 9),
        "drop_height": (3, 5),
        "drop_width": (1, 3),
    },
    "RandomResizedCrop": {"size": (9, 9)},
    "RandomRotation": {"degrees": 30.0},
    "RandomRotation90": {"times": (0, 3)},
    "RandomShear": {"shear": 20.0},
    "RandomTranslate": {"translate_x": (0.0, 0.2), "translate_y": (0.0, 0.2)},
    "Resize": {"size": (11, 13)},
    "SmallestMaxSize": {"max_size": 20},
}

# Needs a model that is downloaded; takes two inputs; names for other things.
APART = {"RandomDissolving", "RandomTransplantation", "auto", "container"}


def members() -> list[str]:
    """Name the augmentations for images."""
    return [
        name
        for name in K.__all__
        if not name.endswith(("3D", "Sequential", "Dispather", "Dispatcher"))
        and "Base" not in name
        and name not in APART
    ]


def test_the_members_are_found() -> None:
    assert len(members()) > 50
    assert {"RandomCrop", "RandomMixUpV2", "PatchMix"} <= set(members())
    assert set(ARGUMENTS) <= set(members())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", members())
def test_each_member_gives_what_kornia_gives(device: torch.device, name: str) -> None:
    module = getattr(K, name)(**ARGUMENTS.get(name, {}))
    (batch,) = images(1, (4, 3, 24, 24))
    expected = as_kornia(module, batch, device=device)
    torch.testing.assert_close(first(batch, module, device=device), expected, **CLOSE)


# Containers #


@pytest.mark.parametrize(
    "make",
    [
        lambda: K.PatchSequential(
            K.RandomHorizontalFlip(), grid_size=(2, 2), patchwise_apply=False
        ),
        lambda: K.ImageSequential(K.RandomHorizontalFlip(), K.ColorJiggle(0.1, 0.1)),
        lambda: K.auto.TrivialAugment(),
        lambda: K.auto.RandAugment(2, 10),
        lambda: K.auto.AutoAugment(),
        lambda: K.AugmentationSequential(
            K.ImageSequential(K.RandomAffine(10.0), random_apply=1),
            data_keys=["input"],
        ),
    ],
    ids=["patch", "image", "trivial", "rand", "auto", "nested"],
)
def test_each_container_gives_what_kornia_gives(
    device: torch.device, make: Callable[[], nn.Module]
) -> None:
    (batch,) = images(1, (4, 3, 24, 24))
    expected = as_kornia(make(), batch, device=device)
    torch.testing.assert_close(first(batch, make(), device=device), expected, **CLOSE)


@pytest.mark.parametrize(
    ("order", "shape"), [("BCTHW", (2, 3, 5, 16, 16)), ("BTCHW", (2, 5, 3, 16, 16))]
)
def test_videos_keep_their_five_dimensions(
    device: torch.device, order: str, shape: tuple[int, ...]
) -> None:
    batch = torch.full(shape, 255, dtype=torch.uint8)
    crop = K.VideoSequential(K.RandomCrop((8, 8)), data_format=order)
    out = first(batch, crop, device=device)
    assert out.shape == (*shape[:3], 8, 8)
    assert out.unique().tolist() == [1.0]


def test_two_images_of_one_sample_get_one_draw(device: torch.device) -> None:
    (batch,) = images(1, (4, 3, 24, 24))
    crop = K.AugmentationSequential(
        K.RandomCrop((12, 10)), data_keys=["input", "input"]
    )
    left, right = first((batch, batch), crop, inputs=(0, 1), device=device)
    assert torch.equal(left, right)


# Volumes #


def turn_volume() -> nn.Module:
    return K.RandomRotation3D((10.0, 10.0, 10.0), p=1.0)


def test_a_batch_of_volumes_keeps_its_rank(device: torch.device) -> None:
    out = first(torch.rand(2, 3, 4, 8, 8), turn_volume(), device=device)
    assert out.shape == (2, 3, 4, 8, 8)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_single_volume_comes_back_as_one(device: torch.device, channels: int) -> None:
    out = first(torch.rand(channels, 4, 8, 8), turn_volume(), device=device)
    assert out.shape == (channels, 4, 8, 8)


# Mixing #


@pytest.mark.filterwarnings("ignore:RandomCutMixV2 currently uses")
@pytest.mark.parametrize("name", ["RandomMixUpV2", "RandomCutMixV2"])
def test_mixed_labels_come_as_kornia_gives_them(
    device: torch.device, name: str
) -> None:
    (batch,) = images(1, (4, 3, 24, 24))
    labels = torch.arange(4)
    module = getattr(K, name)(data_keys=["input", "class"], p=1.0)
    expected = as_kornia(module, batch, labels, device=device)
    out = first((batch, labels), module, inputs=(0, 1), device=device)
    for came, wanted in zip(out, expected, strict=True):
        torch.testing.assert_close(came, wanted)


# Inputs of another kind #


@pytest.mark.parametrize(
    ("image", "name"),
    [
        (None, "NoneType"),
        ("photo.jpg", "str"),
        ([torch.rand(3, 8, 8)], "list"),
        (torch.rand(3, 8, 8).numpy(), "ndarray"),
    ],
    ids=["none", "str", "list", "numpy"],
)
def test_an_image_that_is_no_tensor_is_refused(
    device: torch.device, image: Any, name: str
) -> None:
    with pytest.raises(BatchError, match=rf"{name}.*tensor.*inputs="):
        first((image, 1), K.RandomHorizontalFlip(), device=device)


def test_masks_in_a_list_are_as_kornia_has_them(device: torch.device) -> None:
    (batch,) = images(1, (2, 3, 8, 8))
    masks = [torch.ones(1, 8, 8), torch.zeros(1, 8, 8)]
    module = K.AugmentationSequential(
        K.RandomHorizontalFlip(p=1.0), data_keys=["input", "mask"]
    )
    try:
        expected = as_kornia(module, batch, masks, device=device)
    except Exception as error:
        with pytest.raises(type(error)):
            first((batch, masks), module, inputs=(0, 1), device=device)
    else:
        _, out = first((batch, masks), module, inputs=(0, 1), device=device)
        for came, wanted in zip(out, expected[1], strict=True):
            torch.testing.assert_close(came, wanted)


def test_keypoints_in_a_list_follow_their_own_sample(device: torch.device) -> None:
    """Kornia refuses them; samples rarely have equally many."""
    (batch,) = images(1, (2, 3, 8, 8))
    points = [torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 0.0], [5.0, 6.0]])]
    module = K.AugmentationSequential(
        K.RandomHorizontalFlip(p=1.0), data_keys=["input", "keypoints"]
    )
    _, out = first((batch, points), module, inputs=(0, 1), device=device)
    assert [one.tolist() for one in out] == [[[6, 2]], [[7, 0], [2, 6]]]


# Memory #

# No other tensor of the test session has this height and width.
ODD_SIZE = (37, 41)


def living_images() -> int:
    """Count the memory blocks that hold images of that size, views aside."""
    gc.collect()
    return len(
        {
            thing.untyped_storage().data_ptr()
            for thing in gc.get_objects()
            if type(thing) is torch.Tensor
            and not thing.is_nested
            and thing.layout is torch.strided
            and thing.shape[-2:] == ODD_SIZE
        }
    )


# Some of the objects that are looked through complain of being looked at.
quiet = pytest.mark.filterwarnings("ignore")


@quiet
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(K.RandomHorizontalFlip(), K.RandomRotation(3.0, p=1.0)),
        lambda: K.AugmentationSequential(
            K.RandomHorizontalFlip(), K.RandomAffine(3.0), data_keys=["input"]
        ),
        lambda: K.RandomGaussianBlur((3, 3), (0.1, 2.0), p=1.0),
    ],
    ids=["chain", "container", "one"],
)
def test_no_batch_is_kept_after_it_was_used(
    device: torch.device, make: Callable[[], nn.Module]
) -> None:
    before = living_images()
    module = make()
    source = (torch.rand(2, 3, *ODD_SIZE) for _ in range(4))
    loader = StreamPrefetchLoader(source, module, device=device, depth=1)
    # On a device the next one is in flight, on its way from the host.
    most = 0 if device.type == "cpu" else 3
    iterator = iter(loader)
    for _ in range(4):
        next(iterator)  # And dropped at once, as a loop does after its step.
        assert living_images() - before <= most
    assert list(iterator) == []
    assert living_images() == before


@quiet
def test_meta_a_kept_batch_is_seen() -> None:
    before = living_images()
    module = K.AugmentationSequential(K.RandomHorizontalFlip(), data_keys=["input"])
    module(torch.rand(2, 3, *ODD_SIZE))
    assert living_images() > before
