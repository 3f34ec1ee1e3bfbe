"""Does the loader get right what other loaders got wrong in public?

Thirty cases from bug reports; each docstring names its source, as repository#number on
GitHub. What can only be seen on a GPU is marked ``gpu`` and runs in the GPU suite; the
streams' part of such cases is also played through on a fake device, on any machine.
"""

import contextlib
import copy
import gc
import itertools
import multiprocessing
import os
import pickle
import threading
import time
import traceback
from collections import UserDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import kornia.augmentation as K
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import tv_tensors
from tqdm import tqdm

from gpuprefetch import StreamPrefetchLoader, TransformError, streams
from tests.children import run_script
from tests.compare import tensor_leaves
from tests.fake_device import FakeDevice
from tests.sources import (
    CountingSource,
    Images,
    NoSamples,
    Numbers,
    Pair,
    StatefulSource,
    WrongLength,
    count,
    images,
)

pytestmark = pytest.mark.timeout(30)

gpu = pytest.mark.gpu
two_gpus = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="needs two CUDA devices"
)


def crop_rotate_blur(size: int, p: float = 0.5) -> nn.Sequential:
    """Build the chain that most cases use."""
    return nn.Sequential(
        K.RandomCrop((size, size)),
        K.RandomRotation(30.0, p=p),
        K.RandomGaussianBlur((3, 3), (0.1, 2.0), p=p),
    )


def nested_batches(length: int) -> list[tuple[Any, ...]]:
    return [
        (4, torch.arange(8) + i, [(torch.full((256, 256), i), 8)] * 3)
        for i in range(length)
    ]


# A. Stream hand-off and memory lifetime #


@gpu
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


@gpu
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


@gpu
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


# B. The batch must come back as the same kind of object #


def test_d04_named_tuple_and_tuple_keep_their_types(device: torch.device) -> None:
    """pytorch/pytorch#14613, #48419: both became lists once pinning was on."""
    batch = Pair(torch.ones(2), (torch.zeros(1), [torch.ones(1)]))
    out = next(iter(StreamPrefetchLoader([batch], device=device)))
    assert type(out) is Pair
    assert type(out.y) is tuple
    assert type(out.y[1]) is list
    assert out.x.tolist() == [1, 1]
    assert out.y[1][0].device.type == device.type


@dataclass
class Record:
    ids: list[str]
    x: torch.Tensor


def test_d05_dataclass_is_moved_and_the_source_is_not(
    other_device: torch.device,
) -> None:
    """Lightning-AI/pytorch-lightning#7878: its tensors silently stayed on the CPU."""
    source = Record(["a", "b"], torch.ones(2))
    out = next(iter(StreamPrefetchLoader([source], device=other_device)))
    assert type(out) is Record
    assert out.x.device.type == other_device.type
    assert out.ids == ["a", "b"]
    assert source.x.device.type == "cpu"


class Encoding(UserDict):
    """Knows how to move itself, but not ``non_blocking``."""

    def to(self, device: torch.device) -> "Encoding":
        moved = {k: v.to(device) if v is not None else v for k, v in self.data.items()}
        return type(self)(moved)


class Modern(Encoding):
    """Takes ``non_blocking``, and has a fault of its own."""

    def to(self, device: torch.device, non_blocking: bool = False) -> "Modern":
        raise TypeError("my own fault")


class Graph:
    """Wants to know which stream uses it, as PyG's Data does."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x
        self.recorded: list[Any] = []

    def to(self, device: torch.device, non_blocking: bool = False) -> "Graph":
        return Graph(self.x.to(device, non_blocking=non_blocking))

    def record_stream(self, stream: Any) -> None:
        self.recorded.append(stream)


def test_d06_object_with_a_plain_to_is_moved(other_device: torch.device) -> None:
    """zai-org/GLM-4#248, AutoGPTQ/AutoGPTQ#618: "unexpected keyword non_blocking"."""
    batch = Encoding(ids=torch.arange(4), extra=None)
    out = next(iter(StreamPrefetchLoader([batch], device=other_device)))
    assert type(out) is Encoding
    assert out["extra"] is None
    assert out["ids"].device.type == other_device.type


def test_d06_type_error_inside_a_modern_to_surfaces(
    other_device: torch.device,
) -> None:
    """zai-org/GLM-4#248: a retry without ``non_blocking`` would hide it."""
    batch = Modern(ids=torch.arange(4))
    with pytest.raises(TypeError, match="my own fault"):
        next(iter(StreamPrefetchLoader([batch], device=other_device)))


def test_d06_record_stream_of_an_object_gets_the_consumer_stream(
    fake_device: FakeDevice,
) -> None:
    """pyg-team/pytorch_geometric#2960: a hook made for prefetchers to call."""
    source = [Graph(torch.arange(3))]
    out = next(iter(StreamPrefetchLoader(source, device=fake_device.device)))
    assert fake_device.consumer in out.recorded


@gpu
def test_d06_record_stream_of_an_object_gets_the_current_stream() -> None:
    """pyg-team/pytorch_geometric#2960: the same on a real device."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        out = next(iter(StreamPrefetchLoader([Graph(torch.arange(3))], device="cuda")))
        assert stream in out.recorded
        assert out.x.tolist() == [0, 1, 2]


@pytest.mark.parametrize("background", [False, True])
def test_d07_bounding_boxes_keep_format_and_canvas(
    device: torch.device, background: bool
) -> None:
    """pytorch/vision#8855: boxes came out of a pinned loader as plain tensors."""
    boxes = tv_tensors.BoundingBoxes(
        [[10, 20, 30, 40]], format="XYWH", canvas_size=(100, 100)
    )
    loader = StreamPrefetchLoader([{"b": boxes}], device=device, background=background)
    out = next(iter(loader))["b"]
    assert type(out) is tv_tensors.BoundingBoxes
    assert out.format.name == "XYWH"
    assert out.canvas_size == (100, 100)
    assert out.tolist() == [[10, 20, 30, 40]]


# C. Loop protocol #


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


# D. Errors #


def two_good_one_bad() -> Iterator[torch.Tensor]:
    yield torch.tensor(0)
    yield torch.tensor(1)
    raise ValueError("bad file 2")


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_d11_source_error_comes_after_the_good_batches_and_ends_the_pass(
    device: torch.device, depth: int, background: bool
) -> None:
    """deepseek-ai/DeepSpec#78, meta-pytorch/torchrec#4270: stale batch, or a hang."""
    iterator = iter(
        StreamPrefetchLoader(
            two_good_one_bad(), device=device, depth=depth, background=background
        )
    )
    assert [int(next(iterator)), int(next(iterator))] == [0, 1]
    with pytest.raises(ValueError, match=r"^bad file 2$") as caught:
        next(iterator)
    # The traceback shows the user's own line, and it is the original object.
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert "two_good_one_bad" in [frame.name for frame in frames]
    with pytest.raises(StopIteration):
        next(iterator)


@pytest.mark.parametrize("background", [False, True])
def test_d11_transform_error_comes_at_its_own_batch(
    device: torch.device, background: bool
) -> None:
    """deepseek-ai/DeepSpec#78: the same for a failing transform."""

    def fails_at_two(x: torch.Tensor) -> torch.Tensor:
        if int(x) == 2:
            raise ValueError("cannot augment 2")
        return x

    loader = StreamPrefetchLoader(
        count(5), fails_at_two, device=device, depth=4, background=background
    )
    iterator = iter(loader)
    assert [int(next(iterator)), int(next(iterator))] == [0, 1]
    with pytest.raises(ValueError, match="cannot augment 2") as caught:
        next(iterator)
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert "fails_at_two" in [frame.name for frame in frames]
    with pytest.raises(StopIteration):
        next(iterator)


# E. Stopping early, cleaning up, starting again #


@pytest.mark.parametrize("background", [False, True])
def test_d12_a_broken_off_loop_leaves_nothing_for_the_next(
    device: torch.device, background: bool
) -> None:
    """NVIDIA/recsys-examples#314: evaluation batches became training batches."""
    loader = StreamPrefetchLoader(count(10), device=device, background=background)
    for _ in range(3):
        assert [int(x) for x in itertools.islice(loader, 3)] == [0, 1, 2]


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_d12_a_one_shot_iterator_loses_at_most_depth_items(
    device: torch.device, depth: int, background: bool
) -> None:
    """NVIDIA/recsys-examples#314: what may be pulled beyond what was consumed."""
    source = iter(count(20))
    loader = StreamPrefetchLoader(
        source, device=device, depth=depth, background=background
    )
    assert [int(x) for x in itertools.islice(loader, 3)] == [0, 1, 2]
    loader.close()
    assert int(next(source)) <= 3 + depth


def test_d13_leaving_the_loop_ends_workers_and_threads(device: torch.device) -> None:
    """ultralytics/ultralytics#25827, pytorch/pytorch#9655: both lived on."""
    threads = threading.active_count()
    source = DataLoader(Numbers(100), batch_size=1, num_workers=2)
    assert len(list(itertools.islice(StreamPrefetchLoader(source, device=device), 1)))
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline and (
        threading.active_count() > threads or multiprocessing.active_children()
    ):
        time.sleep(0.02)
    assert threading.active_count() == threads
    assert not multiprocessing.active_children()


@gpu
def test_d13_leaving_the_loop_gives_device_memory_back() -> None:
    """ultralytics/ultralytics#25827: tens of GiB stayed for large images."""
    torch.zeros(1, device="cuda")
    before = torch.cuda.memory_allocated()
    source = [torch.zeros(1 << 22) for _ in range(10)]
    loader = StreamPrefetchLoader(source, device="cuda", depth=4)
    assert len(list(itertools.islice(loader, 1))) == 1
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before


def test_d13_a_script_that_breaks_and_ends_exits_cleanly(device: torch.device) -> None:
    """pytorch/pytorch#9655: it hung at exit."""
    run_script(
        """
        import sys
        from torch.utils.data import DataLoader
        from gpuprefetch import StreamPrefetchLoader
        from tests.sources import Numbers
        source = DataLoader(Numbers(100), batch_size=1, num_workers=2)
        for x in StreamPrefetchLoader(source, device=sys.argv[1]):
            break
        """,
        device.type,
        limit_s=25,
    )


@pytest.mark.parametrize("pin_memory", [False, pytest.param(True, marks=gpu)])
def test_d14_a_second_pass_over_persistent_workers(pin_memory: bool) -> None:
    """pytorch/pytorch#48370: the pinning thread crashed at the second ``iter``."""
    source = DataLoader(
        Numbers(8),
        batch_size=2,
        num_workers=2,
        persistent_workers=True,
        pin_memory=pin_memory,
    )
    device = "cuda" if pin_memory else "cpu"
    loader = StreamPrefetchLoader(source, device=device)
    assert next(iter(loader)).tolist() == [0, 1]
    assert next(iter(loader)).tolist() == [0, 1]
    workers = {process.pid for process in multiprocessing.active_children()}
    epochs = [[batch.tolist() for batch in loader] for _ in range(3)]
    assert epochs == [[[0, 1], [2, 3], [4, 5], [6, 7]]] * 3
    assert workers == {process.pid for process in multiprocessing.active_children()}


# F. Looking like the wrapped loader #


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


# G. Devices and processes #


@gpu
@two_gpus
@pytest.mark.parametrize("name", ["cuda:1", "cuda"])
def test_d16_nothing_touches_the_first_gpu(name: str) -> None:
    """pytorch/pytorch#58626, libffcv/ffcv#190: a context on GPU 0 in every rank."""
    run_script(
        """
        import sys, torch
        import kornia.augmentation as K
        from torch.utils.data import DataLoader
        from gpuprefetch import StreamPrefetchLoader
        from tests.sources import Images
        torch.cuda.set_device(1)
        for pin in (False, True):
            source = DataLoader(Images(8), batch_size=4, num_workers=1, pin_memory=pin)
            aug = K.RandomCrop((8, 8))
            loader = StreamPrefetchLoader(source, aug, device=sys.argv[1])
            for x, y in loader:
                assert x.device.index == y.device.index == 1
            loader.close()
        assert torch.cuda.memory_reserved(0) == 0
        assert torch.cuda.current_device() == 1
        """,
        name,
        limit_s=60,
    )


@gpu
def test_d16_a_global_cuda_default_device_does_not_disturb() -> None:
    """esa/torchquad#157: loaders stop working under ``set_default_device``."""
    source = DataLoader(count(4), shuffle=False)
    torch.set_default_device("cuda")
    assert [int(x) for x in StreamPrefetchLoader(source, device="cuda")] == [0, 1, 2, 3]


@pytest.mark.parametrize("background", [False, True])
def test_d16_the_transform_sees_the_default_device_of_the_loop(
    background: bool,
) -> None:
    """esa/torchquad#157: with ``meta`` as a default device that has no values."""
    seen = []

    def transform(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.empty(1).device.type)
        return x + 1

    batches = count(3)
    torch.set_default_device("meta")
    loader = StreamPrefetchLoader(
        batches, transform, device="cpu", background=background
    )
    assert [int(x) for x in loader] == [1, 2, 3]
    assert seen == ["meta"] * 3


@pytest.mark.timeout(60)
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_d17_transform_runs_in_the_main_process_only(
    device: torch.device, context: str
) -> None:
    """pytorch/pytorch#77159, #13775: CUDA in a forked worker."""
    torch.zeros(1, device=device)
    pids = []

    def transform(x: torch.Tensor) -> torch.Tensor:
        pids.append(os.getpid())
        return x

    source = DataLoader(
        Numbers(8), batch_size=4, num_workers=1, multiprocessing_context=context
    )
    loader = StreamPrefetchLoader(source, transform, device=device)
    assert [x.tolist() for x in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert pids == [os.getpid()] * 2


# H. Thread-local modes #


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_d18_batches_carry_no_graph_and_the_mode_stays(
    device: torch.device, mode: Callable[[], Any], background: bool
) -> None:
    """pytorch/pytorch#20528: a thread does not inherit ``no_grad``."""
    linear = nn.Linear(4, 4).to(device)
    with mode():
        before = torch.is_grad_enabled()
        loader = StreamPrefetchLoader(
            [torch.rand(2, 4)] * 6, linear, device=device, background=background
        )
        for out in loader:
            assert out.grad_fn is None
            assert not out.requires_grad
            assert torch.is_grad_enabled() is before
        assert torch.is_grad_enabled() is before


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0])
def test_d19_autocast_of_the_loop_does_not_reach_the_transform(
    device: torch.device, p: float
) -> None:
    """kornia/kornia#1737: half and float mixed in a blur with 0 < p < 1."""
    blur = K.RandomGaussianBlur((3, 3), (0.1, 3.0), p=p)
    loader = StreamPrefetchLoader([torch.rand(4, 3, 16, 16)] * 51, blur, device=device)
    dtype = torch.float16 if device.type == "cuda" else torch.bfloat16
    with torch.autocast(device.type, dtype):
        seen = {(x.dtype, torch.is_autocast_enabled(device.type)) for x in loader}
    assert seen == {(torch.float32, True)}


# I. Augmentation #


@pytest.mark.parametrize(
    ("augmentation", "distinct"),
    [
        (K.RandomCrop((16, 16)), 8),
        (K.RandomRotation(45.0, p=1.0), 8),
        (K.RandomGaussianBlur((5, 5), (0.1, 3.0), p=1.0), 8),
        (K.RandomRotation(45.0, p=1.0, same_on_batch=True), 1),
    ],
    ids=["crop", "rotation", "blur", "same-on-batch"],
)
def test_d20_each_sample_has_its_own_draw(
    device: torch.device, augmentation: nn.Module, distinct: int
) -> None:
    """pytorch/vision#8484, #2929, GaTech-RL2/EgoVerse#651: one draw for a batch."""
    image = torch.arange(1024.0).reshape(1, 1, 32, 32).repeat(8, 1, 1, 1)
    loader = StreamPrefetchLoader([image] * 2, augmentation, device=device)
    first, second = loader
    assert len(torch.unique(first, dim=0)) == distinct
    assert not torch.equal(first, second)


@pytest.mark.parametrize(("value", "scaled"), [(255, 1.0), (128, 128 / 255), (0, 0.0)])
def test_d21_uint8_is_scaled_to_one(
    device: torch.device, value: int, scaled: float
) -> None:
    """kornia/kornia#523: uint8 images crashed the session."""
    x = torch.full((2, 3, 16, 16), value, dtype=torch.uint8)
    rotation = K.RandomRotation((0.0, 0.0), p=1.0)
    out = next(iter(StreamPrefetchLoader([x], transform=rotation, device=device)))
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, torch.full_like(out, scaled))


def test_d22_a_crop_larger_than_the_image_is_refused(device: torch.device) -> None:
    """kornia/kornia#4414: the image was silently enlarged."""
    x = torch.zeros(1, 1, 4, 4)
    loader = StreamPrefetchLoader([x], K.RandomCrop((8, 8)), device=device)
    with pytest.raises(ValueError, match=r"8, 8.*larger than.*4 x 4"):
        next(iter(loader))


def test_d22_padding_makes_room_for_the_crop(device: torch.device) -> None:
    """kornia/kornia#4414: ones of 4x8 in a padded crop of 6x6 sum to 24."""
    crop = K.RandomCrop((6, 6), pad_if_needed=True)
    loader = StreamPrefetchLoader([torch.ones(1, 1, 4, 8)], crop, device=device)
    out = next(iter(loader))
    assert out.shape == (1, 1, 6, 6)
    assert set(out.unique().tolist()) <= {0.0, 1.0}
    assert float(out.sum()) == 24


def image_and_mask() -> K.AugmentationSequential:
    return K.AugmentationSequential(
        K.RandomCrop((24, 24)),
        K.RandomRotation(45.0, p=1.0),
        K.RandomGaussianBlur((3, 3), (0.5, 2.0), p=1.0),
        data_keys=["input", "mask"],
    )


@pytest.mark.parametrize("how", ["inputs", "batch_transform"])
def test_d23_labels_get_no_invented_values(device: torch.device, how: str) -> None:
    """kornia/kornia#1676, #476: labels 0 and 3 became everything in between."""
    mask = torch.zeros(4, 1, 32, 32, dtype=torch.int64)
    mask[:, :, 8:24, 8:24] = 7
    mask[:, :, 12:20, 12:20] = 3
    batch, chain = (torch.rand(4, 3, 32, 32), mask), image_and_mask()
    loader = (
        StreamPrefetchLoader([batch], chain, inputs=(0, 1), device=device)
        if how == "inputs"
        else StreamPrefetchLoader(
            [batch], batch_transform=lambda b: chain(*b), device=device
        )
    )
    x, labels = next(iter(loader))
    assert x.shape == (4, 3, 24, 24)
    assert labels.shape == (4, 1, 24, 24)
    assert labels.dtype == torch.int64
    assert set(labels.unique().tolist()) == {0, 3, 7}


def test_d23_image_and_mask_turn_together(device: torch.device) -> None:
    """kornia/kornia#476: by 90 degrees, pixel (2, 5) of 8x8 goes to (2, 2)."""
    x, mask = torch.zeros(1, 1, 8, 8), torch.zeros(1, 1, 8, 8, dtype=torch.int64)
    x[0, 0, 2, 5], mask[0, 0, 2, 5] = 1.0, 9
    chain = K.AugmentationSequential(
        K.RandomRotation((90.0, 90.0), p=1.0), data_keys=["input", "mask"]
    )
    loader = StreamPrefetchLoader([(x, mask)], chain, inputs=(0, 1), device=device)
    out, labels = next(iter(loader))
    assert (out[0, 0] > 0.5).nonzero().tolist() == [[2, 2]]
    assert labels[0, 0].nonzero().tolist() == [[2, 2]]
    assert int(labels[0, 0, 2, 2]) == 9


@pytest.mark.parametrize("channels", [1, 3, 4, 12])
def test_d24_any_number_of_channels(device: torch.device, channels: int) -> None:
    """huggingface/pytorch-image-models#1123, #976: MNIST failed."""
    batch = torch.rand(2, channels, 16, 16)
    loader = StreamPrefetchLoader([batch], crop_rotate_blur(8), device=device)
    assert next(iter(loader)).shape == (2, channels, 8, 8)
    normalize = K.Normalize(torch.tensor(0.5), torch.tensor(0.25))
    ones = torch.ones(2, channels, 4, 4)
    out = next(iter(StreamPrefetchLoader([ones], normalize, device=device)))
    torch.testing.assert_close(out, torch.full_like(out, 2.0))


def test_d24_three_means_for_one_channel_name_both_lengths(
    device: torch.device,
) -> None:
    """huggingface/pytorch-image-models#976: mean and std were made for three."""
    three = K.Normalize(torch.full((3,), 0.5), torch.full((3,), 0.25))
    loader = StreamPrefetchLoader([torch.ones(2, 1, 4, 4)], three, device=device)
    with pytest.raises(ValueError, match=r"1.*3|3.*1"):
        next(iter(loader))


@gpu
def test_d25_a_kornia_module_left_on_the_cpu_works_on_the_gpu() -> None:
    """kornia/kornia#3066, #3117, #4151: images came back on the CPU."""
    batch = (torch.rand(4, 3, 32, 32), torch.zeros(4, 1, 32, 32))
    chain = image_and_mask()
    for settings in (
        {"transform": chain, "inputs": (0, 1)},
        {"batch_transform": lambda b: chain(*b)},
    ):
        loader = StreamPrefetchLoader([batch] * 20, device="cuda", **settings)
        for x, mask in loader:
            assert x.device.type == mask.device.type == "cuda"


def test_d25_a_result_on_another_device_is_reported(
    other_device: torch.device,
) -> None:
    """kornia/kornia#3066: never passed on silently; the leaf is named."""

    def leave(batch: Any) -> Any:
        return batch["x"], {"y": torch.zeros(1, device="cpu")}

    loader = StreamPrefetchLoader(
        [{"x": torch.rand(1)}], batch_transform=leave, device=other_device
    )
    with pytest.raises(TransformError, match=r"batch\[1\]\['y'\].*cpu"):
        next(iter(loader))


# J. Randomness and resuming #


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


# K. Capture, compile, copying, speed #


@gpu
@pytest.mark.timeout(120)
@pytest.mark.parametrize("mode", ["thread_local", "global"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_d28_a_graph_can_be_captured_in_mid_epoch(mode: str, num_workers: int) -> None:
    """LibreYOLO/libreyolo#681: a thread's CUDA call broke the capture."""
    source = DataLoader(Images(48), batch_size=4, num_workers=num_workers)
    chain, model = crop_rotate_blur(8), nn.Conv2d(3, 4, 3).cuda()
    loader = StreamPrefetchLoader(source, chain, device="cuda")
    with torch.no_grad():
        model(torch.zeros(4, 3, 8, 8, device="cuda"))  # Choose the kernels first.
        for _ in range(20):
            for i, (x, labels) in enumerate(loader):
                assert labels.tolist() == list(range(4 * i, 4 * i + 4))
                if i == 3:
                    static = x.clone()
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph, capture_error_mode=mode):
                        y = model(static)
                if i >= 3:
                    static.copy_(x)
                    graph.replay()
                    torch.testing.assert_close(y, model(x), atol=1e-4, rtol=1e-4)


@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_d28_a_compiled_model_beside_a_kornia_transform(device: torch.device) -> None:
    """pytorch/pytorch#118260, #136833: compiled functions used from two threads."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).to(device)
    compiled = torch.compile(model, backend="eager")
    source = DataLoader(Images(100), batch_size=2, num_workers=1)
    loader = StreamPrefetchLoader(source, crop_rotate_blur(8), device=device)
    steps = 0
    for x, _ in loader:
        torch.testing.assert_close(compiled(x), model(x))
        steps += 1
    assert steps == 50


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


def test_d30_the_source_is_read_while_the_loop_works() -> None:
    """pytorch/tutorials#2983, numba/numba#5130: the host's part of the overlap."""
    read = [threading.Event() for _ in range(5)]

    def source() -> Iterator[torch.Tensor]:
        for i in range(5):
            read[i].set()
            yield torch.tensor(i)

    with contextlib.closing(
        iter(StreamPrefetchLoader(source(), device="cpu", depth=2, background=True))
    ) as iterator:
        next(iterator)
        # The loop is inside its body now: nobody asks for batches 1 and 2.
        assert read[1].wait(20)
        assert read[2].wait(20)
        assert not read[4].is_set()


@pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")
@gpu
@pytest.mark.timeout(300)
def test_d30_copies_run_beside_the_model() -> None:
    """discuss.pytorch.org "tensor-to-non-blocking-cuda-streams-optimisation"."""
    weight = torch.rand(4096, 4096, device="cuda")
    batches = [torch.rand(64, 1 << 16) for _ in range(12)]

    def copies_beside_kernels(loader: Any) -> tuple[int, int]:
        with torch.profiler.profile(
            activities=[
                torch.profiler.ProfilerActivity.CPU,
                torch.profiler.ProfilerActivity.CUDA,
            ]
        ) as profile:
            for _ in loader:
                for _ in range(20):
                    weight @ weight
            torch.cuda.synchronize()
        return _overlapping_copies(profile)

    def serial() -> Iterator[torch.Tensor]:
        for batch in batches:
            yield batch.to("cuda")

    wrapped, copies = copies_beside_kernels(
        StreamPrefetchLoader(batches, device="cuda")
    )
    assert copies >= len(batches)
    assert wrapped >= copies // 2
    # The detector detects: the plain loop copies between its steps, not beside them.
    assert copies_beside_kernels(serial())[0] <= 1


def _overlapping_copies(profile: torch.profiler.profile) -> tuple[int, int]:
    """Count the copies to the device that ran beside a kernel, and all of them."""
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            is_copy = "Memcpy HtoD" in event.name
            if is_copy or "gemm" in event.name or "cutlass" in event.name:
                spans[is_copy].append((event.time_range.start, event.time_range.end))
    beside = sum(
        any(start < end_k and start_k < end for start_k, end_k in spans[False])
        for start, end in spans[True]
    )
    return beside, len(spans[True])
