"""Is a module that holds Kornia augmentations and is not taken over told, and why?"""

from collections.abc import Callable
from typing import Any

import kornia.augmentation as K
import pytest
import torch
from torch import nn

from gpuprefetch import SettingTypeError, StreamPrefetchLoader
from gpuprefetch.augment import fuse
from gpuprefetch.diagnose import diagnose
from gpuprefetch.histogram import Spread
from gpuprefetch.probe import Effort, probe
from gpuprefetch.stats import LoaderStats
from gpuprefetch.transform import describe_transform, fusion_of

pytestmark = pytest.mark.timeout(30)


class Mine(nn.Module):
    """Somebody's own augmentation, which is no subclass of one of Kornia's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flip(0)


class Holder(nn.Module):
    """Uses a Kornia augmentation in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.flip = K.RandomHorizontalFlip()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.flip(x)


def chain(member: nn.Module) -> nn.Sequential:
    return nn.Sequential(K.RandomCrop((4, 4)), member, K.Normalize(0.5, 0.5))


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (chain(Mine()), "Mine"),
        (chain(nn.Identity()), "Identity"),
        (chain(nn.Sequential(K.RandomInvert(), Mine())), "Mine"),
        (chain(Holder()), "Holder"),
    ],
)
def test_the_member_that_stands_in_the_way_is_named(
    module: nn.Module, name: str
) -> None:
    reason = fusion_of(module)
    assert reason.startswith(f"not fused: {name} is no Kornia augmentation, so ")
    assert "does not take the chain over: it is called as it is" in reason
    assert "uint8 is not scaled" in reason
    assert "Make it a subclass of Kornia's IntensityAugmentationBase2D" in reason
    assert describe_transform(module) == f"Sequential ({reason})"


def test_a_module_of_ones_own_is_told_to_hand_over_what_it_holds() -> None:
    reason = fusion_of(Holder())
    assert reason.startswith("not fused: Holder is no Kornia augmentation, so ")
    assert "Pass those members themselves, in an nn.Sequential, or scale" in reason


@pytest.mark.parametrize(
    "function",
    [None, torch.neg, Mine(), nn.Sequential(Mine(), nn.ReLU()), nn.Sequential()],
)
def test_what_holds_no_kornia_augmentation_needs_no_reason(function: Any) -> None:
    assert fusion_of(function) == ""


@pytest.mark.parametrize("wrap", [lambda module: module, fuse])
def test_what_is_taken_over_is_not_told_otherwise(
    wrap: Callable[[nn.Module], nn.Module],
) -> None:
    assert "is no Kornia" not in fusion_of(wrap(chain(K.RandomInvert())))


def test_the_report_of_a_pass_gives_the_reason(device: torch.device) -> None:
    images = torch.rand(2, 3, 8, 8)
    loader = StreamPrefetchLoader([images] * 3, chain(Mine()), device=device)
    list(loader)
    assert "transform: Sequential (not fused: Mine is no Kornia" in loader.report()
    assert loader.stats().is_fused is False


def test_an_error_at_images_that_were_not_scaled_says_why(device: torch.device) -> None:
    images = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
    loader = StreamPrefetchLoader([images], chain(Mine()), device=device)
    with pytest.raises(TypeError) as caught:
        next(iter(loader))
    (note,) = caught.value.__notes__
    assert "Tensor (2, 3, 8, 8) torch.uint8" in note
    assert "Mine is no Kornia augmentation, so the loader does not take" in note


def test_advice_on_such_a_chain_does_not_send_it_to_fuse() -> None:
    spread = {
        name: Spread(value, value, value, 40)
        for name, value in (
            ("period_ms", 10.0),
            ("loader_ms", 7.9),
            ("transform_host_ms", 7.8),
            ("transform_ms", 7.8),
            ("stall_ms", 5.0),
        )
    }
    fusion = fusion_of(chain(Mine()))
    stats = LoaderStats(batches=100, is_overlapped=True, fusion=fusion, **spread)
    advice = diagnose(stats).advice
    assert "Mine is no Kornia augmentation" in advice
    assert "fuse(" not in advice
    assert advice.endswith("or scale yourself.")


def test_the_plain_loop_of_a_probe_calls_it_as_the_loader_does() -> None:
    dtypes = set()

    class Notes(Holder):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            dtypes.add(x.dtype)
            return super().forward(x.float())

    source = [torch.zeros(2, 3, 8, 8, dtype=torch.uint8)] * 12
    device = torch.device("cpu")
    effort = Effort(batches=8, rounds=2)
    probe(source, lambda batch: None, Notes(), device=device, effort=effort)
    assert dtypes == {torch.uint8}


@pytest.mark.parametrize(
    ("module", "what"),
    [
        (
            chain(Mine()),
            "whose member 1 is a Mine, which is none of them",
        ),
        (
            chain(nn.Sequential(K.RandomInvert(), nn.Identity())),
            "whose member 1.1 is an Identity, which is none",
        ),
        (Mine(), r"got Mine\."),
        (nn.Sequential(), r"got an empty nn.Sequential\."),
    ],
)
def test_fuse_names_the_member_that_it_does_not_take(
    module: nn.Module, what: str
) -> None:
    with pytest.raises(SettingTypeError, match=what):
        fuse(module)
