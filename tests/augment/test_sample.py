"""Numbers are drawn as Kornia draws them, from the caller's generator only."""

from __future__ import annotations

import kornia.augmentation as K
import pytest
import torch
from chains import MEMBERS, plan_of
from torch import Tensor, nn

from gpuprefetch.augment.fusing import fuse
from gpuprefetch.augment.sample import Sampler
from gpuprefetch.errors import ImageSizeError

BATCH, SIZE = 4000, (40, 60)


def flat_params(params: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every drawn number as a column of floats."""
    names = ("src", "degrees", "angle", "translations", "scale", "shear_x", "shear_y")
    colors = (f"{name}_factor" for name in ("brightness", "contrast", "saturation"))
    erased = ("xs", "ys", "widths", "heights", "values")
    return {
        name: params[name].float().reshape(BATCH, -1)
        for name in (*names, "sigma", *colors, "hue_factor", *erased, "batch_prob")
        if name in params and params[name].shape[0] == BATCH
    }


# A fixed order without brightness: Kornia draws a factor and does not use it.
_APART = ("crop if needed", "jiggle in order")


@pytest.mark.parametrize(
    "name",
    [name for name in MEMBERS if "normalize" not in name and name not in _APART],
)
def test_distributions_equal_kornias(name: str) -> None:
    """Range, mean and spread of every parameter, over 4000 samples."""
    module = MEMBERS[name]()
    shape = (BATCH, 3, 60, 80)
    ours = flat_params(fuse(module).to_kornia(fuse(module).sample(shape)))
    theirs = flat_params(module.forward_parameters(torch.Size(shape)))
    assert ours.keys() == theirs.keys()
    if getattr(module, "same_on_batch", False):
        return
    for key, values in ours.items():
        expected = theirs[key]
        spread = expected.std(0)
        tolerance = (spread * 0.12).clamp_min(1e-6)
        assert ((values.mean(0) - expected.mean(0)).abs() <= tolerance).all(), key
        assert ((values.std(0) - spread).abs() <= tolerance).all(), key
        reach = (spread * 0.5).clamp_min(1e-5)
        assert (values.amin(0) >= expected.amin(0) - reach).all(), key
        assert (values.amax(0) <= expected.amax(0) + reach).all(), key


def test_samples_are_independent() -> None:
    plan = plan_of(
        K.RandomCrop((20, 30)), K.RandomRotation(45.0), K.RandomRotation(9.0)
    )
    pack = Sampler(plan)(BATCH, SIZE, torch.Generator().manual_seed(0))
    correlation = torch.corrcoef(pack.T) - torch.eye(pack.shape[1])
    assert correlation.abs().max() < 0.06
    neighbours = torch.corrcoef(torch.stack((pack[1:, 3], pack[:-1, 3])))[0, 1]
    assert neighbours.abs() < 0.06


def test_same_on_batch_draws_once_for_its_member_only() -> None:
    plan = plan_of(K.RandomRotation(45.0, same_on_batch=True), K.RandomRotation(45.0))
    pack = Sampler(plan)(50, SIZE, None)
    first, second = (pack[:, columns["degrees"]] for columns in plan.layout)
    assert first.unique().numel() == 1
    assert second.unique().numel() == 50
    shared = plan_of(K.RandomResizedCrop((9, 9), same_on_batch=True))
    assert Sampler(shared)(50, SIZE, None).unique(dim=0).shape[0] == 1


def test_resized_crop_always_fits() -> None:
    plan = plan_of(K.RandomResizedCrop((9, 9), scale=(0.9, 1.0), ratio=(2.5, 3.0)))
    left, top, width, height = Sampler(plan)(BATCH, SIZE, None).unbind(1)
    assert (width >= 1).all()
    assert (height >= 1).all()
    assert (left + width <= SIZE[1]).all()
    assert (top + height <= SIZE[0]).all()


def test_the_generator_decides_and_torchs_own_is_left_alone() -> None:
    fused = fuse(nn.Sequential(K.RandomRotation(45.0), K.RandomGamma((0.5, 1.5))))
    before = torch.get_rng_state()
    one, two, other = (
        fused.sample((4, 3, 8, 8), torch.Generator().manual_seed(seed))
        for seed in (1, 1, 2)
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one.flat, two.flat)
    assert not torch.equal(one.flat, other.flat)
    factors = [params.kept[0]["gamma_factor"] for params in (one, two, other)]
    assert torch.equal(factors[0], factors[1])
    assert not torch.equal(factors[0], factors[2])


@pytest.mark.parametrize("module", [K.RandomCrop((41, 9)), K.CenterCrop((9, 61))])
def test_a_crop_larger_than_the_image_names_both_sizes(module: nn.Module) -> None:
    with pytest.raises(ImageSizeError, match=r"(41, 9|9, 61).*larger than.*40 x 60"):
        fuse(module).sample((2, 3, *SIZE))
