"""Faults that an attack on the loader found, each kept out by a test.

Every one was wrong data, a hang or a leak once.
"""

import contextlib
import gc
import itertools
import time
import weakref
from collections import UserDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from gpuprefetch import StateError, StreamPrefetchLoader
from tests.fake_device import FakeDevice

pytestmark = pytest.mark.timeout(30)

META = "meta"


class Lazy(UserDict[str, Any]):
    """Makes a new tensor each time that it is asked for one."""

    def __getitem__(self, key: str) -> torch.Tensor:
        return torch.as_tensor(self.data[key])


def test_a_container_that_makes_tensors_on_access_shifts_no_other_leaf() -> None:
    lazy = Lazy(a=np.array([7.0, 7.0, 7.0]))
    source = [(lazy, torch.tensor([0.0, 1.0, 2.0]))]
    loader = StreamPrefetchLoader(source, device="cpu", background=True)
    ((_, labels),) = list(loader)
    assert labels.tolist() == [0.0, 1.0, 2.0]


class Refilling(DataLoader[Any]):
    """Hands out one buffer, refilled from what the workers made."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        buffer = torch.zeros(2)
        for batch in super().__iter__():
            buffer.copy_(batch)
            yield buffer


def test_a_loader_subclass_may_refill_a_buffer_of_its_own() -> None:
    source = Refilling(torch.arange(12.0), batch_size=2, num_workers=1)
    loader = StreamPrefetchLoader(source, device="cpu", background=True)
    assert [x.tolist() for x in loader] == [[i, i + 1] for i in range(0, 12, 2)]


class Trainer:
    """Keeps its loader, its pass and, as the transform, a method of its own."""

    def __init__(self, background: bool) -> None:
        source = [torch.ones(2)] * 5
        self.loader = StreamPrefetchLoader(
            source, transform=self.augment, device="cpu", background=background
        )
        self.batches = iter(self.loader)
        next(self.batches)

    def augment(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


@pytest.mark.parametrize("background", [False, True])
def test_a_pass_that_its_own_transform_can_reach_is_collected(
    background: bool,
) -> None:
    trainer = weakref.ref(Trainer(background))
    gc.collect()
    assert trainer() is None


def test_an_interrupted_transform_loses_and_repeats_nothing(
    fake_device: FakeDevice,
) -> None:
    interrupts = iter([False, False, True] + [False] * 100)

    def transform(x: torch.Tensor) -> torch.Tensor:
        if next(interrupts):
            raise KeyboardInterrupt
        return x

    shapes = [torch.zeros(n + 1) for n in range(12)]
    batches = iter(StreamPrefetchLoader(shapes, transform=transform, device=META))
    got: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        got.extend(len(x) for x in batches)
    got = [1]
    got.extend(len(x) for x in batches)
    assert got == [n + 1 for n in range(12)]


def test_an_in_place_transform_leaves_the_data_set_alone() -> None:
    source = [torch.ones(2), torch.ones(2)]
    loader = StreamPrefetchLoader(source, transform=lambda x: x.mul_(2), device="cpu")
    for _epoch in range(2):
        assert [x.tolist() for x in loader] == [[2.0, 2.0], [2.0, 2.0]]
    assert source[0].tolist() == [1.0, 1.0]


def test_an_error_at_the_threads_start_surfaces(
    monkeypatch: pytest.MonkeyPatch, fake_device: FakeDevice
) -> None:
    def refuse(device: torch.device) -> None:
        raise RuntimeError("device busy")

    monkeypatch.setattr("gpuprefetch.feeder.make_current", refuse)
    loader = StreamPrefetchLoader([torch.ones(2)], device=META, background=True)
    with pytest.raises(RuntimeError, match="device busy"):
        next(iter(loader))


def test_one_seed_before_each_epoch_repeats_pixels_with_persistent_workers() -> None:
    source = DataLoader(
        torch.zeros(4, 2), batch_size=2, num_workers=1, persistent_workers=True
    )
    loader = StreamPrefetchLoader(
        source, transform=lambda x: x + torch.rand(()), device="cpu"
    )
    epochs = []
    for _ in range(3):
        torch.manual_seed(5)
        epochs.append(torch.stack(list(loader)))
    assert torch.equal(epochs[0], epochs[1])
    assert torch.equal(epochs[1], epochs[2])
    del source._iterator  # Ends the workers.


class LiveState:
    """A source whose state is the very dict that it goes on to change."""

    def __init__(self) -> None:
        self.state = {"next": 0}

    def state_dict(self) -> dict[str, int]:
        return self.state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = dict(state)

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.state["next"] < 6:
            self.state["next"] += 1
            yield torch.tensor(self.state["next"] - 1)


def test_a_live_state_of_the_source_is_saved_as_it_was() -> None:
    loader = StreamPrefetchLoader(LiveState(), device="cpu", background=True, depth=4)
    assert [int(x) for x in itertools.islice(loader, 2)] == [0, 1]
    assert loader.state_dict()["source_state"] == {"next": 2}


def test_a_state_of_a_source_with_one_is_refused_by_a_source_without() -> None:
    saved = StreamPrefetchLoader(LiveState(), device="cpu")
    list(saved)
    with pytest.raises(StateError, match="saved over a source with a state_dict"):
        StreamPrefetchLoader([1], device="cpu").load_state_dict(saved.state_dict())


def test_a_failed_batch_is_not_kept_by_its_error() -> None:
    alive: list[weakref.ref[torch.Tensor]] = []

    def fail(x: torch.Tensor) -> torch.Tensor:
        large = torch.zeros(10)
        alive.append(weakref.ref(large))
        raise RuntimeError("out of memory")

    gc.disable()
    try:
        with contextlib.suppress(RuntimeError):
            next(iter(StreamPrefetchLoader([torch.ones(2)], fail, device="cpu")))
        assert alive[0]() is None
    finally:
        gc.enable()


def test_a_device_tensor_that_the_source_refills_is_not_torn(
    fake_device: FakeDevice,
) -> None:
    pulled = []

    def refilling() -> Iterator[torch.Tensor]:
        buffer = torch.zeros(2, device=META)
        for index in range(6):
            pulled.append(index)
            yield buffer

    batches = iter(StreamPrefetchLoader(refilling(), device=META, depth=3))
    for index in range(3):
        next(batches)
        # With it in flight the source is not asked for more.
        assert pulled[-1] == index


@pytest.mark.parametrize("seeds", [(1, None), (None, 1), (1, 2)])
def test_a_state_of_another_seed_is_refused(seeds: tuple[int | None, ...]) -> None:
    saved, other = (
        StreamPrefetchLoader([torch.ones(2)] * 3, torch.neg, device="cpu", seed=seed)
        for seed in seeds
    )
    next(iter(saved))
    with pytest.raises(StateError, match=f"saved with seed={seeds[0]}"):
        other.load_state_dict(saved.state_dict())


def test_a_used_up_iterator_warns() -> None:
    loader = StreamPrefetchLoader(iter([torch.ones(2)]), device="cpu")
    assert len(list(loader)) == 1
    with pytest.warns(UserWarning, match="used up"):
        assert list(loader) == []


def test_a_data_set_is_no_source() -> None:
    class Numbers(Dataset[torch.Tensor]):
        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.tensor(index)

    with pytest.raises(TypeError, match="Wrap a Dataset in a DataLoader"):
        StreamPrefetchLoader(Numbers(), device="cpu")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("result", "message"), [(None, "returned None"), (np.ones(2), "NumPy array")]
)
def test_a_transform_that_returns_no_tensor_is_refused(
    result: object, message: str
) -> None:
    loader = StreamPrefetchLoader([torch.ones(2)], lambda x: result, device="cpu")
    with pytest.raises(ValueError, match=message):
        next(iter(loader))


def test_transforms_in_two_threads_do_not_draw_from_each_others_seed() -> None:
    def noise(x: torch.Tensor) -> torch.Tensor:
        first = x + torch.rand(())
        time.sleep(0.0005)
        return first + torch.rand(())

    def run() -> list[torch.Tensor]:
        source = [torch.zeros(1)] * 60
        inner = StreamPrefetchLoader(source, noise, device="cpu", seed=1)
        outer = StreamPrefetchLoader(
            inner, noise, device="cpu", seed=2, background=True
        )
        return list(outer)

    runs = [torch.cat(run()) for _ in range(3)]
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[1], runs[2])
