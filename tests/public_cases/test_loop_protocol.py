"""Does the loader behave in a loop as the loader that it wraps?"""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm

from gpuprefetch import StreamPrefetchLoader
from tests.public_cases.chains import crop_rotate_blur
from tests.sources import Images, NoSamples, Numbers, WrongLength

pytestmark = pytest.mark.timeout(30)


# Iteration and length #


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("empty", [[], DataLoader(NoSamples())], ids=["list", "shard"])
def test_d08_empty_loader_yields_nothing_twice(
    device: torch.device, empty: Any, background: bool
) -> None:
    """huggingface/accelerate#3367, #601, #3659: one None batch came out."""
    loader = StreamPrefetchLoader(empty, device=device, background=background)
    assert list(loader) == []
    assert list(loader) == []


class Unsized:
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(5))


def test_d09_length_is_the_source_length_or_a_type_error(device: torch.device) -> None:
    """pytorch/pytorch#37753, Lightning-AI/pytorch-lightning#17218."""
    loader = StreamPrefetchLoader(Unsized(), device=device)
    with pytest.raises(TypeError, match="Unsized"):
        len(loader)
    assert len(list(loader)) == 5
    with open(os.devnull, "w") as sink:
        assert len(list(tqdm(loader, file=sink))) == 5


@pytest.mark.filterwarnings("ignore:Length of IterableDataset")
def test_d09_length_never_cuts_or_stretches_the_epoch(device: torch.device) -> None:
    """pytorch-lifestream/pytorch-lifestream#197: the epoch ended at ``len``."""
    wrong = StreamPrefetchLoader(DataLoader(WrongLength(3, 10)), device=device)
    assert len(wrong) == 3
    assert len(list(wrong)) == 10
    short = DataLoader(WrongLength(10, 10), batch_size=4)
    assert len(StreamPrefetchLoader(short, device=device)) == 3
    dropping = DataLoader(WrongLength(10, 10), batch_size=4, drop_last=True)
    assert len(StreamPrefetchLoader(dropping, device=device)) == 2


@pytest.mark.parametrize(("drop_last", "sizes"), [(False, [4, 4, 2]), (True, [4, 4])])
def test_d10_the_last_batch_may_be_smaller(
    device: torch.device, drop_last: bool, sizes: list[int]
) -> None:
    """kornia/kornia#2497, #2302: a container remembered the first batch size."""
    source = DataLoader(
        [image for image, _ in (Images(10)[i] for i in range(10))],
        batch_size=4,
        drop_last=drop_last,
    )
    loader = StreamPrefetchLoader(source, transform=crop_rotate_blur(8), device=device)
    assert [tuple(x.shape) for x in loader] == [(n, 3, 8, 8) for n in sizes]


def test_d10_the_image_size_may_change_between_batches(device: torch.device) -> None:
    """kornia/kornia#2302: state of the first batch met the second."""
    source = [torch.rand(2, 3, side, side + 2) for side in (16, 9, 20)]
    loader = StreamPrefetchLoader(source, transform=crop_rotate_blur(8), device=device)
    assert [tuple(x.shape) for x in loader] == [(2, 3, 8, 8)] * 3


# Looking like the wrapped loader #


def test_d15_attributes_of_the_source_are_there(device: torch.device) -> None:
    """diux-dev/cluster#71: no ``batch_sampler``."""
    source = DataLoader(Numbers(16), batch_size=4, drop_last=True)
    loader = StreamPrefetchLoader(source, device=device)
    for name in ("sampler", "batch_sampler", "dataset", "collate_fn"):
        assert getattr(loader, name) is getattr(source, name)
    assert loader.batch_size == 4
    assert loader.drop_last is True
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = loader.no_such_thing


def test_d15_set_epoch_reaches_the_sampler(device: torch.device) -> None:
    """huggingface/accelerate#2205: ``set_epoch`` crashed on the wrapper."""
    sampler = DistributedSampler(range(16), num_replicas=2, rank=0)
    source = DataLoader(Numbers(16), batch_size=4, sampler=sampler)
    loader = StreamPrefetchLoader(source, device=device)
    seen = set()
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        order = [batch.tolist() for batch in loader]
        assert order == [batch.tolist() for batch in source]
        seen.add(str(order))
    assert len(seen) == 3


def test_d15_a_loader_without_batch_sampler_works(device: torch.device) -> None:
    """huggingface/accelerate#2205: ``batch_size=None`` has ``batch_sampler=None``."""
    source = DataLoader(Numbers(4), batch_size=None)
    loader = StreamPrefetchLoader(source, device=device)
    assert loader.batch_sampler is None
    assert [int(x) for x in loader] == [0, 1, 2, 3]
