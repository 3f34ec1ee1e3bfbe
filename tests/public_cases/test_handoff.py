"""Are streams handed off in order, and does memory live long enough and no longer?"""

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from gpuprefetch import StreamPrefetchLoader, streams
from tests.compare import tensor_leaves
from tests.fake_device import FakeDevice
from tests.public_cases.chains import crop_rotate_blur
from tests.sources import Images, count

pytestmark = pytest.mark.timeout(30)


def nested_batches(length: int) -> list[tuple[Any, ...]]:
    return [
        (4, torch.arange(8) + i, [(torch.full((256, 256), i), 8)] * 3)
        for i in range(length)
    ]


@pytest.mark.gpu
@pytest.mark.timeout(120)
def test_d01_nested_tensors_stay_valid_while_in_use() -> None:
    """ray-project/ray#66344, NVIDIA/apex#304: only top-level tensors were recorded."""
    kept = []
    loader = StreamPrefetchLoader(nested_batches(200), device="cuda")
    for i, (number, ids, pairs) in enumerate(loader):
        pressure = [torch.empty(256, 256, device="cuda").fill_(-1) for _ in range(8)]
        right = torch.equal(ids.cpu(), torch.arange(8) + i) and number == 4
        kept.append(right and all(bool((a == i).all()) for a, _ in pairs))
        del pressure
    assert kept == [True] * 200


def test_d01_every_leaf_is_recorded_on_the_consumer_stream(
    fake_device: FakeDevice,
) -> None:
    """ray-project/ray#66344, NVIDIA/apex#304: counted on a fake device."""
    batches = nested_batches(5)
    for batch in StreamPrefetchLoader(batches, device=fake_device.device):
        leaves = tensor_leaves(batch)
        assert len(leaves) == 4
        recorded = fake_device.recorded_on(fake_device.consumer)
        assert {id(leaf) for leaf in leaves} <= recorded


@pytest.mark.gpu
@pytest.mark.timeout(120)
@pytest.mark.parametrize("on_own_stream", [False, True])
def test_d02_consumer_reads_only_after_the_side_stream(on_own_stream: bool) -> None:
    """ROCm/pytorch#3194: about 98 of 100 iterations read what was there before."""

    def slow(x: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(20_000_000)
        return x * 1

    source = [torch.full((2048, 2048), float(i)).pin_memory() for i in range(100)]
    loader = StreamPrefetchLoader(source, transform=slow, device="cuda")
    stream = torch.cuda.Stream() if on_own_stream else torch.cuda.default_stream()
    with torch.cuda.stream(stream):
        wrong = [(x != i).any() for i, x in enumerate(loader)]
        assert int(torch.stack(wrong).sum()) == 0


def test_d02_the_stream_current_at_each_next_waits_for_its_own_batch(
    fake_device: FakeDevice,
) -> None:
    """ROCm/pytorch#3194: played through on a fake device."""
    loader = StreamPrefetchLoader(count(6), device=fake_device.device, depth=3)
    iterator = iter(loader)
    for i in range(6):
        stream = fake_device.new_stream() if i % 2 else fake_device.consumer
        with fake_device.current(stream):
            next(iterator)
        waited_for = fake_device.last_wait(stream)
        # Its own batch's event, the (i + 1)-th made: not one of the batches behind it.
        assert waited_for is fake_device.batch_marks()[i]


@pytest.mark.parametrize("removed", ["record_use", "enqueue_wait"])
def test_meta_d01_d02_a_removed_hand_off_is_seen(
    fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch, removed: str
) -> None:
    """The counting above fails when either half of the hand-off is switched off."""
    if removed == "record_use":
        monkeypatch.setattr(streams, "record_use", lambda leaf, stream: None)
    else:
        monkeypatch.setattr(
            streams, "enqueue_wait", lambda event, device: fake_device.consumer
        )
    list(StreamPrefetchLoader(nested_batches(3), device=fake_device.device))
    is_recorded = bool(fake_device.recorded_on(fake_device.consumer))
    is_waited_for = any(
        mark in fake_device.consumer.waited_for for mark in fake_device.batch_marks()
    )
    assert is_recorded is (removed != "record_use")
    assert is_waited_for is (removed != "enqueue_wait")


@pytest.mark.gpu
@pytest.mark.timeout(120)
def test_d03_reserved_memory_is_flat_over_epochs() -> None:
    """huggingface/pytorch-image-models#2781: a new stream in every epoch."""
    source = DataLoader(Images(256), batch_size=32, pin_memory=True)
    loader = StreamPrefetchLoader(source, crop_rotate_blur(8), device="cuda")
    model = nn.Conv2d(3, 8, 3).cuda()
    reserved, allocated = [], []
    for _ in range(40):
        for x, _y in loader:
            model(x)
        del x, _y
        gc.collect()
        torch.cuda.synchronize()
        reserved.append(torch.cuda.memory_reserved())
        allocated.append(torch.cuda.memory_allocated())
    assert max(reserved[3:]) == min(reserved[3:])
    assert max(allocated[3:]) == min(allocated[3:])


def test_d03_forty_epochs_make_one_side_stream(fake_device: FakeDevice) -> None:
    """huggingface/pytorch-image-models#2781: counted on a fake device."""
    loader = StreamPrefetchLoader(count(3), device=fake_device.device)
    assert fake_device.made_streams == 0
    for _ in range(40):
        assert len(list(loader)) == 3
    assert fake_device.made_streams == 1
