"""Does the loader look and behave like what it wraps, and keep its bounds?"""

import itertools
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm

from gpuprefetch import StreamPrefetchLoader
from tests.fake_device import FakeDevice
from tests.sources import (
    CountingSource,
    Numbers,
    OwnIterator,
    RefillingSource,
    WrongLength,
    count,
)

pytestmark = pytest.mark.timeout(30)

both_feeders = pytest.mark.parametrize("background", [False, True])
all_depths = pytest.mark.parametrize("depth", [1, 2, 3, 4])


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


# Length #


@pytest.mark.parametrize(
    ("source", "length"),
    [
        (count(3), 3),
        ([], 0),
        (DataLoader(Numbers(10), batch_size=4), 3),
        (DataLoader(Numbers(10), batch_size=4, drop_last=True), 2),
        (DataLoader(WrongLength(10, 4), batch_size=4), 3),
    ],
)
def test_length_is_that_of_the_source(source: Any, length: int) -> None:
    loader = StreamPrefetchLoader(source)
    assert len(loader) == len(source) == length


class LengthFails:
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(count(3))

    def __len__(self) -> int:
        raise NotImplementedError("no idea")


@pytest.mark.parametrize("source", [iter(count(3)), OwnIterator(3), LengthFails()])
def test_length_is_a_type_error_where_the_source_has_none(source: Any) -> None:
    loader = StreamPrefetchLoader(source)
    with pytest.raises(TypeError, match=rf"{type(source).__name__}.*no length"):
        len(loader)
    # Anything but a TypeError would come through here.
    assert [int(x) for x in list(loader)] == [0, 1, 2]


def test_a_progress_bar_counts_every_batch() -> None:
    loader = StreamPrefetchLoader(DataLoader(Numbers(10), batch_size=3))
    with open(os.devnull, "w") as sink:
        bar = tqdm(loader, file=sink)
        assert bar.total == 4
        assert len(list(bar)) == 4
        assert bar.n == 4


# Attributes #


def test_attributes_are_read_from_the_source() -> None:
    source = DataLoader(Numbers(8), batch_size=4, num_workers=0)
    loader = StreamPrefetchLoader(source)
    for name in ("dataset", "sampler", "batch_sampler", "collate_fn", "generator"):
        assert getattr(loader, name) is getattr(source, name)
    assert loader.num_workers == 0
    assert loader.source is source
    assert hasattr(loader, "pin_memory")
    assert not hasattr(loader, "smapler")


def test_attributes_are_written_to_the_source() -> None:
    source = DataLoader(Numbers(8), batch_size=4)
    loader = StreamPrefetchLoader(source)
    loader.collate_fn = list
    assert source.collate_fn is list
    assert isinstance(next(iter(loader)), list)


@pytest.mark.parametrize("name", ["transform", "depth", "seed", "device"])
def test_a_setting_that_would_be_set_in_vain_is_refused(name: str) -> None:
    loader = StreamPrefetchLoader([torch.ones(1)])
    with pytest.raises(AttributeError, match=rf"{name} is a setting .*{name}=\.\.\."):
        setattr(loader, name, object())


def test_a_subclass_may_keep_what_it_gave_to_the_constructor() -> None:
    class Keeping(StreamPrefetchLoader[Any]):
        def __init__(self, source: Any, transform: Any) -> None:
            super().__init__(source, transform)
            self.transform = transform

    loader = Keeping([torch.ones(1)], torch.neg)
    assert loader.transform is torch.neg
    assert next(iter(loader)).item() == -1


def test_a_subclass_may_set_attributes_before_the_constructor_runs() -> None:
    class Named(StreamPrefetchLoader[Any]):
        def __init__(self, name: str, source: Any) -> None:
            self.name = name
            super().__init__(source)

    loader = Named("train", [torch.ones(1)])
    assert (loader.name, len(list(loader))) == ("train", 1)


def test_attributes_that_the_source_does_not_have_stay_here() -> None:
    source = DataLoader(Numbers(8), batch_size=4)
    loader = StreamPrefetchLoader(source)
    loader.my_note = "x"
    assert loader.my_note == "x"
    assert not hasattr(source, "my_note")


def test_a_property_of_the_source_that_fails_says_its_own_reason() -> None:
    class Fails(list):
        @property
        def broken(self) -> int:
            return self.not_there

    loader = StreamPrefetchLoader(Fails())
    with pytest.raises(AttributeError, match=r"not_there|broken"):
        _ = loader.broken


def test_set_epoch_works_on_the_sampler_and_on_a_source_that_has_it() -> None:
    sampler = DistributedSampler(range(16), num_replicas=2, rank=1)
    source = DataLoader(Numbers(16), batch_size=None, sampler=sampler)
    loader = StreamPrefetchLoader(source)
    orders = []
    for epoch in (0, 1, 0):
        loader.sampler.set_epoch(epoch)
        orders.append([int(x) for x in loader])
    assert orders[0] == orders[2] != orders[1]

    class WithEpoch(CountingSource):
        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    counting = WithEpoch(count(2))
    StreamPrefetchLoader(counting).set_epoch(3)
    assert counting.epoch == 3


def test_a_generic_alias_leaves_no_mark_on_the_source() -> None:
    source = DataLoader(Numbers(2))
    before = dict(vars(source))
    loader = StreamPrefetchLoader[torch.Tensor](source)
    assert vars(source) == before
    assert len(list(loader)) == 2


def test_repr_names_source_transform_device_and_depth() -> None:
    loader = StreamPrefetchLoader(count(2), double, device="cpu", depth=3)
    text = repr(loader)
    for part in ("StreamPrefetchLoader", "list", "double", "cpu", "3"):
        assert part in text


# Where batches go #


def test_the_default_device_is_the_accelerator_or_the_cpu() -> None:
    expected = (
        torch.accelerator.current_accelerator()
        if torch.accelerator.is_available()
        else torch.device("cpu")
    )
    assert next(iter(StreamPrefetchLoader(count(1)))).device.type == expected.type


@pytest.mark.gpu
@pytest.mark.parametrize("device", [0, "cuda", "cuda:0", torch.device("cuda", 0)])
def test_a_device_may_be_named_in_any_way(device: Any) -> None:
    out = next(iter(StreamPrefetchLoader(count(1), device=device)))
    assert out.device == torch.device("cuda", 0)


def test_tensors_on_the_device_are_yielded_as_they_are(device: torch.device) -> None:
    x = torch.ones(2, device=device)
    assert next(iter(StreamPrefetchLoader([x], device=device))) is x


# None batches, empty sources #


@both_feeders
def test_a_none_batch_passes_by_without_the_transform(
    device: torch.device, background: bool
) -> None:
    source = [torch.tensor(1), None, torch.tensor(2), None]
    for settings in ({"transform": double}, {"batch_transform": double}):
        loader = StreamPrefetchLoader(
            source, device=device, background=background, **settings
        )
        out = [x if x is None else int(x) for x in loader]
        assert out == [2, None, 4, None]


def test_a_none_batch_on_a_device_with_streams(fake_device: FakeDevice) -> None:
    source = [None, torch.tensor(1), None]
    loader = StreamPrefetchLoader(source, device=fake_device.device)
    assert [x is None for x in loader] == [True, False, True]


@both_feeders
@pytest.mark.parametrize("batch", [0, False, (), [], {}, "", torch.empty(0)])
def test_no_value_of_a_batch_ends_the_epoch(batch: Any, background: bool) -> None:
    loader = StreamPrefetchLoader([batch] * 3, device="cpu", background=background)
    assert len(list(loader)) == 3


@both_feeders
@pytest.mark.parametrize("transform", [None, double])
def test_an_empty_source_gives_no_batch(
    device: torch.device, transform: Any, background: bool
) -> None:
    loader = StreamPrefetchLoader([], transform, device=device, background=background)
    assert list(loader) == []
    assert list(loader) == []
    with pytest.raises(StopIteration):
        next(iter(loader))


# Bounds #


@both_feeders
@all_depths
def test_the_source_is_never_more_than_depth_ahead(
    background: bool, depth: int
) -> None:
    source = CountingSource(count(20))
    iterator = iter(
        StreamPrefetchLoader(source, device="cpu", background=background, depth=depth)
    )
    ahead = depth if background else 0
    for i in range(20):
        assert int(next(iterator)) == i
        if background:
            wait_for(lambda i=i: source.pulled == min(i + 1 + ahead, 20))
        assert source.pulled <= i + 1 + ahead
    with pytest.raises(StopIteration):
        next(iterator)


@all_depths
def test_the_source_is_never_more_than_depth_ahead_on_a_device(
    fake_device: FakeDevice, depth: int
) -> None:
    for background in (False, True):
        source = CountingSource(count(20))
        loader = StreamPrefetchLoader(
            source, device=fake_device.device, background=background, depth=depth
        )
        most = 0
        for i, _ in enumerate(loader):
            most = max(most, source.pulled - i - 1)
        assert i == 19
        assert most <= depth
        assert most >= min(depth - 1, 1), "nothing is prefetched at all"


class CountingLoader(DataLoader):
    """Counts the batches that are pulled from it."""

    pulled = 0

    def __iter__(self) -> Iterator[Any]:
        self.pulled = 0
        for batch in super().__iter__():
            self.pulled += 1
            yield batch


# DataLoaders with workers deliver in bursts, so two more are taken from them.
EXTRA_FROM_WORKERS = 2


def test_workers_are_pulled_at_most_two_further() -> None:
    source = CountingLoader(Numbers(30), batch_size=None, num_workers=1)
    loader = StreamPrefetchLoader(source, device="cpu", depth=3)
    for i, _ in enumerate(loader):
        most = i + 1 + 3 + EXTRA_FROM_WORKERS
        wait_for(lambda most=most: source.pulled >= min(most, 30), limit_s=0.05)
        assert source.pulled <= most
    assert i == 29


@both_feeders
@all_depths
def test_no_more_than_depth_batches_live_beside_the_one_in_use(
    background: bool, depth: int
) -> None:
    living: list[weakref.ref[torch.Tensor]] = []

    def source() -> Iterator[torch.Tensor]:
        for i in range(12):
            batch = torch.full((3,), i)
            living.append(weakref.ref(batch))
            yield batch
            del batch

    loader = StreamPrefetchLoader(
        source(), device="cpu", depth=depth, background=background
    )
    for i, x in enumerate(loader):
        wait_for(lambda i=i: len(living) >= min(i + 1 + depth, 12), limit_s=0.05)
        assert x.tolist() == [i] * 3
        # A thread that pulls ahead keeps a copy of its own, and the source its last.
        assert sum(ref() is not None for ref in living) <= depth + 2
    del x
    assert sum(ref() is not None for ref in living) == 0


def wait_for(condition: Callable[[], bool], limit_s: float = 5.0) -> None:
    """Let the feeder thread catch up; do not fail if it does not."""
    pause = torch.multiprocessing.get_context("fork").Event()
    for _ in range(int(limit_s / 0.005)):
        if condition():
            return
        pause.wait(0.005)


@both_feeders
@all_depths
def test_a_source_may_refill_its_buffer(
    device: torch.device, depth: int, background: bool
) -> None:
    loader = StreamPrefetchLoader(
        RefillingSource(8), device=device, depth=depth, background=background
    )
    seen = [sorted(set(x.tolist())) for x in loader]
    assert seen == [[float(i)] for i in range(8)]


def refilled_arrays() -> Iterator[dict[str, Any]]:
    array = np.zeros(3)
    for i in range(8):
        array[:] = i
        yield {"x": torch.tensor(i), "n": array}


@both_feeders
@all_depths
def test_a_source_may_refill_its_arrays(depth: int, background: bool) -> None:
    loader = StreamPrefetchLoader(
        refilled_arrays(), device="cpu", depth=depth, background=background
    )
    for i, batch in enumerate(loader):
        wait_for(lambda: False, limit_s=0.02)
        assert batch["n"].tolist() == [i] * 3


@both_feeders
@all_depths
def test_a_source_may_refill_its_arrays_for_a_device_with_streams(
    fake_device: FakeDevice, depth: int, background: bool
) -> None:
    """Batches are pulled ahead for it, with and without a thread."""
    loader = StreamPrefetchLoader(
        refilled_arrays(),
        device=fake_device.device,
        depth=depth,
        background=background,
    )
    for i, batch in enumerate(loader):
        assert batch["n"].tolist() == [i] * 3


# Loaders around loaders #


def plus_noise(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand(1, device=x.device)


def nested() -> StreamPrefetchLoader[torch.Tensor]:
    source = DataLoader(torch.arange(20.0), batch_size=2, shuffle=True, num_workers=1)
    inner = StreamPrefetchLoader(source, plus_noise, device="cpu")
    return StreamPrefetchLoader(inner, plus_noise, device="cpu", background=True)


def test_a_loader_around_a_loader_behaves_and_resumes() -> None:
    loader = nested()
    assert len(loader) == 10
    assert loader.batch_size == 2
    torch.manual_seed(5)
    whole = [x.tolist() for x in loader]
    assert len(whole) == 10
    torch.manual_seed(5)
    again = nested()
    iterator = iter(again)
    assert [next(iterator).tolist() for _ in range(4)] == whole[:4]
    state = again.state_dict()
    del iterator
    torch.manual_seed(6)
    resumed = nested()
    resumed.load_state_dict(state)
    assert [x.tolist() for x in resumed] == whole[4:]


# StatefulDataLoader #


def stateful(length: int = 12, **settings: Any) -> Any:
    module = pytest.importorskip("torchdata.stateful_dataloader")
    return module.StatefulDataLoader(Numbers(length), batch_size=2, **settings)


# torchdata 0.11 calls a function that torch has deprecated since.
quiet_torchdata = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


@quiet_torchdata
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("yielded", [1, 2, 5, 6])
def test_a_stateful_loader_resumes_after_what_was_yielded(
    num_workers: int, yielded: int
) -> None:
    loader = StreamPrefetchLoader(stateful(num_workers=num_workers), depth=4)
    iterator = iter(loader)
    got = [x.tolist() for x in itertools.islice(iterator, yielded)]
    state = loader.state_dict()
    loader.close()
    resumed = StreamPrefetchLoader(stateful(num_workers=num_workers), depth=4)
    resumed.load_state_dict(state)
    got += [x.tolist() for x in resumed]
    assert got == [[i, i + 1] for i in range(0, 12, 2)]


@quiet_torchdata
def test_a_stateful_loader_gives_epoch_after_epoch() -> None:
    loader = StreamPrefetchLoader(stateful(), background=True)
    assert [len(list(loader)) for _ in range(3)] == [6, 6, 6]
