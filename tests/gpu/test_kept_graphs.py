"""Members of a chain as CUDA graphs: the member's images, with each batch's numbers."""

import logging
from typing import Any

import kornia.augmentation as K
import pytest
import torch
from torch import Tensor, nn

from gpuprefetch import StreamPrefetchLoader
from gpuprefetch.augment.fusing import fuse
from gpuprefetch.augment.kept_graphs import GraphedMember
from gpuprefetch.augment.kornia_adapter import KorniaTransform
from gpuprefetch.augment.segments import draw_kept
from gpuprefetch.seeding import generators_seeded
from tests.gpu.support import CUDA, allocated_bytes, pause_device

SHAPE = (4, 3, 24, 24)

# Kornia's own that have no fused step, or not with these settings.
_CAPTURED = [
    K.RandomPerspective(p=0.5),
    K.RandomAffine(30.0, (0.1, 0.1), (0.8, 1.2), 5.0, p=0.5),
    K.RandomRotation(30.0, resample="bicubic", p=0.5),
    K.Resize((20, 20), antialias=True),
    K.RandomGaussianBlur((21, 21), (0.1, 2.0), p=0.5),
    K.RandomGaussianBlur((5, 3), (0.1, 2.0), separable=False, p=1.0),
    K.RandomMedianBlur(p=0.5),
    K.RandomGamma((0.5, 2.0), (0.8, 1.5), p=0.5),
    K.RandomSolarize(p=0.5),
    K.RandomPosterize(p=0.5),
    K.RandomSharpness(p=0.5),
    K.RandomEqualize(p=0.5),
    K.RandomChannelShuffle(p=0.5),
    K.RandomGaussianNoise(p=0.5),
    K.RandomElasticTransform(p=0.5),
    K.RandomPlasmaShadow(p=0.5),
]

# These read their numbers on the host, or copy from there, while they are applied.
_NOT_CAPTURED = [
    K.RandomCrop((20, 20), p=0.999),
    K.RandomResizedCrop((20, 20), resample="bicubic"),
    K.RandomMotionBlur(3, 35.0, 0.5, p=0.5),
    K.RandomThinPlateSpline(p=0.5),
    K.RandomFisheye(
        *(torch.tensor(one) for one in ([-0.3, 0.3], [-0.3, 0.3], [0.9, 1.0]))
    ),
]


def compare_batches(module: nn.Module) -> GraphedMember:
    """Hold a member to itself without graphs, over batches with their own numbers."""
    kept = KorniaTransform(module).module
    member, images = GraphedMember(kept), torch.rand(SHAPE, device=CUDA)
    for seed in range(6):
        with generators_seeded(seed, CUDA), torch.no_grad():
            expected = kept(images, params=draw_kept(kept, SHAPE, None)[0])
        with generators_seeded(seed, CUDA):
            result = member(images, draw_kept(kept, SHAPE, None)[0])
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-6)
    return member


@pytest.mark.parametrize("module", _CAPTURED, ids=lambda one: type(one).__name__)
def test_a_graph_gives_the_members_images(module: nn.Module) -> None:
    member = compare_batches(module)
    assert not member.why_eager
    assert len(member._graphs) == 1


@pytest.mark.parametrize("module", _NOT_CAPTURED, ids=lambda one: type(one).__name__)
def test_what_cannot_be_captured_runs_as_it_is(
    module: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="gpuprefetch"):
        member = compare_batches(module)
    assert "it cannot be captured" in member.why_eager
    assert len(caplog.records) == 1
    # A capture that was broken off leaves nothing behind for the next one.
    assert not compare_batches(K.RandomGamma(p=1.0)).why_eager


class Fading(K.RandomGamma):
    """A user's own: each call is darker than the one before, by a counter in Python."""

    calls = 0

    def apply_transform(self, *args: Any, **settings: Any) -> Tensor:
        self.calls += 1
        return super().apply_transform(*args, **settings) * 0.5**self.calls


def test_a_member_whose_work_a_graph_would_freeze_gets_none() -> None:
    kept = KorniaTransform(Fading((0.5, 2.0), p=1.0)).module
    member, images = GraphedMember(kept), torch.rand(SHAPE, device=CUDA)
    with torch.no_grad():
        member(images, draw_kept(kept, SHAPE, None)[0])
    assert "other images than the member" in member.why_eager


def chain() -> nn.Sequential:
    """Fused, kept, fused, kept."""
    return nn.Sequential(
        K.RandomCrop((20, 20)),
        K.RandomPerspective(p=0.5),
        K.RandomHorizontalFlip(),
        K.RandomGamma((0.5, 2.0), p=1.0),
    )


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("is_slow", [False, True])
def test_a_loader_gives_the_same_pixels_with_graphs(depth: int, is_slow: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    source = [
        torch.randint(0, 256, SHAPE, dtype=torch.uint8, generator=generator)
        for _ in range(7)
    ]
    results = []
    for fused in (fuse(chain()), fuse(chain(), kept="graphed")):
        loader = StreamPrefetchLoader(source, fused, seed=3, depth=depth)
        taken = []
        for batch in loader:
            if is_slow:
                pause_device()
            taken.append(batch * 1)
        results.append(torch.stack(taken))
        loader.close()
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-5)
    assert "kept members as graphs on CUDA" in fused.summary
    assert "without a graph" not in fused.summary


def test_results_belong_to_the_caller() -> None:
    fused = fuse(K.RandomGamma((0.5, 2.0), p=1.0), kept="graphed")
    images = torch.rand(SHAPE, device=CUDA)
    results = [fused(images) for _ in range(4)]
    assert len({result.data_ptr() for result in results}) == 4
    assert not torch.equal(results[0], results[1])


def test_a_host_that_runs_ahead_does_not_overwrite_numbers() -> None:
    module = K.RandomGamma((0.5, 2.0))
    fused, eager = fuse(module, kept="graphed"), fuse(module)
    images = torch.rand(SHAPE, device=CUDA)
    fused(images)
    params = [fused.sample(SHAPE) for _ in range(40)]
    expected = [eager(images, params=one) for one in params]
    torch.cuda.synchronize()
    pause_device()
    results = [fused(images, params=one) for one in params]
    torch.testing.assert_close(results, expected, rtol=0, atol=1e-6)


def test_memory_goes_back() -> None:
    images, held = torch.rand(SHAPE, device=CUDA), []
    for _ in range(3):
        fused = fuse(chain(), kept="graphed")
        fused(images)
        del fused
        # cuBLAS keeps a buffer for each stream on which anything was captured.
        torch._C._cuda_clearCublasWorkspaces()
        held.append(allocated_bytes())
    # The first one leaves what libraries keep for the process.
    assert held[1] == held[2]
