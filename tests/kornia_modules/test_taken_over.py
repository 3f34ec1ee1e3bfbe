"""Which callables does the loader take over or fuse, and does it say so?"""

from typing import Any

import kornia.augmentation as K
import pytest
import torch
from torch import nn

from gpuprefetch import StreamPrefetchLoader
from gpuprefetch.augment.fusing import fuse
from tests.kornia_modules.oracle import (
    CLOSE,
    as_kornia,
    blur,
    chain,
    crop,
    first,
    rotation,
    sequential,
)
from tests.sources import images

pytestmark = pytest.mark.timeout(60)


# Taken over or not #


class MyFlip(K.RandomHorizontalFlip):
    """A user's own augmentation in Kornia style."""


class MyChain(nn.Sequential):
    """A user's own container that happens to hold Kornia modules."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == torch.uint8, "this class wants the batch as it is"
        return super().forward(x / 255)


def test_a_subclass_of_a_kornia_class_is_taken_over(device: torch.device) -> None:
    x = torch.full((2, 3, 4, 4), 255, dtype=torch.uint8)
    assert first(x, MyFlip(p=1.0), device=device).unique().tolist() == [1.0]
    chained = nn.Sequential(MyFlip(p=1.0), K.RandomVerticalFlip())
    assert first(x, chained, device=device).unique().tolist() == [1.0]


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Identity()),
        nn.Sequential(K.RandomHorizontalFlip(p=0.0), nn.Identity()),
        nn.Sequential(),
        nn.Identity(),
        lambda x: x,
    ],
    ids=["identity", "mixed", "empty", "module", "function"],
)
def test_other_callables_get_the_batch_as_it_is(
    device: torch.device, module: Any
) -> None:
    x = torch.full((2, 3, 4, 4), 255, dtype=torch.uint8)
    if isinstance(module, nn.Sequential) and len(module) == 2:
        # Not a chain of Kornia modules alone, so nothing is scaled for it.
        with pytest.raises(TypeError, match="uint8"):
            first(x, module, device=device)
    else:
        out = first(x, module, device=device)
        assert out.dtype == torch.uint8
        assert torch.equal(out.cpu(), x)


def test_the_users_own_container_gets_the_batch_as_it_is(device: torch.device) -> None:
    x = torch.full((2, 3, 4, 4), 255, dtype=torch.uint8)
    out = first(x, MyChain(K.RandomHorizontalFlip(p=1.0)), device=device)
    assert out.unique().tolist() == [1.0]


def test_a_function_around_kornia_is_not_taken_over(device: torch.device) -> None:
    x = torch.full((2, 3, 4, 4), 255, dtype=torch.uint8)
    with pytest.raises(TypeError, match="uint8"):
        first(x, lambda image: rotation(image), device=device)


def test_torchvision_transforms_work(device: torch.device) -> None:
    from torchvision.transforms import v2

    transform = v2.Compose(
        [v2.RandomCrop(8), v2.ToDtype(torch.float32, scale=True), v2.RandomGrayscale()]
    )
    x = torch.full((2, 3, 16, 16), 255, dtype=torch.uint8)
    out = first(x, transform, device=device)
    assert out.shape == (2, 3, 8, 8)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.cpu(), torch.ones(2, 3, 8, 8))


# Fused or not #


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (chain(), "Sequential (fused)"),
        (sequential("input", "mask"), "AugmentationSequential (fused)"),
        (
            nn.Sequential(crop, K.RandomInvert()),
            "Sequential (fused, except RandomInvert: there is no fused step for this "
            "class)",
        ),
        (
            nn.Sequential(MyFlip(), crop),
            "(fused, except MyFlip: it is not one of Kornia's own classes)",
        ),
        (
            K.ImageSequential(crop, blur, random_apply=1),
            "(not fused, Kornia: ImageSequential: random_apply draws",
        ),
        (
            nn.Sequential(crop, K.RandomMixUpV2()),
            "(not fused, Kornia: RandomMixUpV2 does not run between fused members)",
        ),
        (
            K.AugmentationSequential(
                crop,
                K.RandomErasing(torch.tensor([0.1, 0.2]).half()),
                data_keys=["input", "mask"],
            ),
            "(not fused, Kornia: labels follow it; RandomErasing: scale is a tensor",
        ),
        (
            K.AugmentationSequential(crop, data_keys=None),
            "(not fused, Kornia: data_keys=None takes dictionaries)",
        ),
        (
            fuse(nn.Sequential(crop, K.RandomInvert())),
            "FusedAugmentation (fused, except RandomInvert: there is no",
        ),
        (torch.neg, "neg"),
    ],
)
def test_the_loader_says_what_runs_fused_and_why_the_rest_does_not(
    module: Any, text: str
) -> None:
    loader = StreamPrefetchLoader(images(1), module, device="cpu", inputs=0)
    assert text in repr(loader)
    assert text in loader.stats().transform
    assert text in loader.report()


def test_a_fused_chain_leaves_every_global_generator_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Setting and restoring them would cost the loop's thread time at each batch."""
    monkeypatch.setattr(
        "gpuprefetch.augment.seeded.generators_seeded", lambda *_: pytest.fail("set")
    )
    (batch,) = images(1, (6, 3, 20, 24))
    before = torch.get_rng_state()
    first(batch, chain())
    assert torch.equal(torch.get_rng_state(), before)


def test_what_fuse_returned_is_a_transform_too(device: torch.device) -> None:
    (batch,) = images(1, (6, 3, 20, 24))
    explicit = fuse(chain(), dtype=torch.float16)
    out = first(batch, explicit, device=device)
    assert out.dtype == torch.float16
    torch.testing.assert_close(
        out.float(), first(batch, chain(), device=device), rtol=0, atol=5e-3
    )


def test_fused_segments_and_kornia_between_them_share_one_seed(
    device: torch.device,
) -> None:
    (batch,) = images(1, (6, 3, 20, 24))
    mixed = nn.Sequential(rotation, K.RandomGamma((0.5, 1.5), p=1.0), crop)
    one, two = (first(batch, mixed, device=device) for _ in range(2))
    assert torch.equal(one, two)
    other = first(batch, mixed, device=device, seed=6)
    assert not torch.equal(one, other)
    torch.testing.assert_close(one, as_kornia(mixed, batch, device=device), **CLOSE)
