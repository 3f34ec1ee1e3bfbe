"""Are order, draws and position those of the plain loop, also in a copy?"""

import copy
import itertools
import pickle
import threading

import kornia.augmentation as K
import pytest
import torch
from torch.utils.data import DataLoader

from gpuprefetch import StreamPrefetchLoader
from tests.public_cases.chains import crop_rotate_blur
from tests.sources import CountingSource, Images, Numbers, StatefulSource, count, images

pytestmark = pytest.mark.timeout(30)


# Randomness and resuming #


def test_d26_construction_draws_nothing_and_starts_nothing(
    device: torch.device,
) -> None:
    """huggingface/accelerate#4204: the wrapper built an iterator at once."""
    state, threads = torch.get_rng_state(), threading.active_count()
    source = CountingSource(count(3))
    StreamPrefetchLoader(source, device=device, background=True)
    assert torch.equal(state, torch.get_rng_state())
    assert threading.active_count() == threads
    assert source.opened == 0
    assert source.pulled == 0


def test_d26_sample_order_is_that_of_the_bare_loader(device: torch.device) -> None:
    """pytorch/pytorch#122697, #36998: wrapping changed all later numbers."""
    source = DataLoader(Numbers(10), shuffle=True, batch_size=2)
    torch.manual_seed(7)
    expected = [batch.tolist() for batch in source]
    torch.manual_seed(7)
    loader = StreamPrefetchLoader(source, device=device)
    assert [batch.tolist() for batch in loader] == expected


def test_d26_pixels_do_not_depend_on_depth_or_on_the_loop(device: torch.device) -> None:
    """pytorch/pytorch#36998: bitwise, with the loop drawing in between."""

    def run(depth: int, draws: int) -> list[torch.Tensor]:
        torch.manual_seed(0)
        loader = StreamPrefetchLoader(
            images(6), crop_rotate_blur(8), device=device, depth=depth
        )
        return [(x, torch.rand(draws, device=device))[0] for x in loader]

    expected = run(1, 0)
    for depth, draws in itertools.product((1, 2, 4), (0, 3)):
        for left, right in zip(expected, run(depth, draws), strict=True):
            assert torch.equal(left, right)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_d27_resuming_skips_and_repeats_nothing(
    device: torch.device, depth: int, background: bool
) -> None:
    """huggingface/accelerate#3938, #3952: indices 8 and 9 came twice."""
    loader = StreamPrefetchLoader(
        StatefulSource(10), device=device, depth=depth, background=background
    )
    iterator = iter(loader)
    assert [int(next(iterator)) for _ in range(3)] == [0, 1, 2]
    state = loader.state_dict()
    resumed = StreamPrefetchLoader(
        StatefulSource(10), device=device, depth=depth, background=background
    )
    resumed.load_state_dict(state)
    assert [int(x) for x in resumed] == list(range(3, 10))


# Copying the loader #


def test_d29_copies_start_at_zero_and_disturb_nothing(device: torch.device) -> None:
    """deepspeedai/DeepSpeedExamples#903, NVIDIA/apex#30: "cannot pickle 'Stream'"."""
    loader = StreamPrefetchLoader(count(5), device=device)
    size = len(pickle.dumps(loader))
    iterator = iter(loader)
    next(iterator)
    for twin in (copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert [int(x) for x in twin] == [0, 1, 2, 3, 4]
    assert [int(x) for x in iterator] == [1, 2, 3, 4]
    assert len(pickle.dumps(loader)) <= size + 200
    assert [int(x) for x in copy.deepcopy(loader)] == [0, 1, 2, 3, 4]


def test_d29_the_pickle_carries_no_batch(device: torch.device) -> None:
    """kornia/kornia#4482: an augmentation kept its last input batch."""
    source = DataLoader(Images(4, (3, 64, 64)), batch_size=4)
    chain = K.AugmentationSequential(K.RandomCrop((24, 24)), data_keys=["input"])
    loader = StreamPrefetchLoader(source, chain, device=device)
    size = len(pickle.dumps(loader))
    for _ in range(2):
        list(loader)
    assert len(pickle.dumps(loader)) <= size + 200
