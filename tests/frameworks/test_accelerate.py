"""Does Accelerate shard our source, and know where the loop is while we run ahead?"""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kornia.augmentation as K
import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import AcceleratorState, GradientState
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from gpuprefetch import SettingError, SettingTypeError, StateError, StreamPrefetchLoader
from gpuprefetch.integrations.accelerate import prepare
from tests.ranks_worker import BATCH_SIZE as SHARED_BATCH
from tests.ranks_worker import NUM_ITEMS as NUM_SHARED
from tests.torchrun import torchrun

pytestmark = pytest.mark.filterwarnings("default")

NUM_ITEMS, BATCH_SIZE, NUM_BATCHES = 22, 4, 6


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    yield Accelerator(
        cpu=True,
        gradient_accumulation_steps=4,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def build_loader(**settings: Any) -> StreamPrefetchLoader[Any]:
    images = torch.arange(NUM_ITEMS * 3 * 8 * 8).to(torch.uint8)
    data = TensorDataset(images.reshape(-1, 3, 8, 8), torch.arange(NUM_ITEMS))
    source = DataLoader(data, BATCH_SIZE, shuffle=True)
    augment = K.RandomRotation(90.0, p=1.0)
    return StreamPrefetchLoader(source, augment, device="cpu", seed=0, **settings)


def test_the_loop_gets_the_shard_of_accelerate(accelerator: Accelerator) -> None:
    bare = accelerator.prepare(build_loader().source)
    ours = prepare(accelerator, build_loader())
    for _ in range(2):
        expected = [labels.tolist() for _, labels in bare]
        assert [labels.tolist() for _, labels in ours] == expected
    assert len(ours) == len(bare) == NUM_BATCHES


@pytest.mark.parametrize("background", [False, True])
def test_accelerate_sees_the_end_when_the_loop_has_the_last_batch(
    accelerator: Accelerator, background: bool
) -> None:
    """However far ahead the loader is: here it may pull all there is."""
    ours = prepare(accelerator, build_loader(depth=9, background=background))
    state = accelerator.gradient_state
    ends, syncs, remainders = [], [], []
    for images, _ in ours:
        with accelerator.accumulate(torch.nn.Identity()):
            ends.append(state.end_of_dataloader)
            syncs.append(accelerator.sync_gradients)
            remainders.append(len(accelerator.gather_for_metrics(images)))
    assert ends == [False] * 5 + [True]
    assert syncs == [False, False, False, True, False, True]
    assert sum(remainders) == NUM_ITEMS
    assert state.active_dataloader is None


def test_meta_a_loader_around_a_prepared_one_sees_the_end_too_early(
    accelerator: Accelerator,
) -> None:
    """Why there is a function of our own."""
    prepared = accelerator.prepare(build_loader().source)

    def without_state() -> Iterator[Any]:
        yield from prepared

    loader = StreamPrefetchLoader(without_state(), depth=9, background=True)
    ends = []
    for _ in loader:
        time.sleep(0.05)  # Let the thread run ahead.
        ends.append(accelerator.gradient_state.end_of_dataloader)
    assert ends != [False] * 5 + [True]


def test_a_break_leaves_nothing_behind(accelerator: Accelerator) -> None:
    ours = prepare(accelerator, build_loader())
    for _ in ours:
        assert accelerator.gradient_state.in_dataloader
        break
    assert not accelerator.gradient_state.in_dataloader


def read(ours: Any) -> list[tuple[list[int], torch.Tensor]]:
    return [(labels.tolist(), images) for images, labels in ours]


@pytest.mark.parametrize("saved_after", [1, 3, NUM_BATCHES])
def test_resume_through_save_state_is_exact(
    accelerator: Accelerator, saved_after: int, tmp_path: Path
) -> None:
    """In the second epoch, whose order is another than that of the first."""
    ours = prepare(accelerator, build_loader())
    accelerator.register_for_checkpointing(ours)
    read(ours)
    expected = []
    for number, (images, labels) in enumerate(ours, start=1):
        if number > saved_after:
            expected.append((labels.tolist(), images))
        if number == saved_after:
            accelerator.save_state(str(tmp_path))
    expected += read(ours)

    torch.manual_seed(99)  # Another process starts from another seed.
    again = prepare(accelerator, build_loader())
    accelerator._custom_objects.clear()
    accelerator.register_for_checkpointing(again)
    accelerator.load_state(str(tmp_path))
    ends, resumed = [], []
    for images, labels in again:
        resumed.append((labels.tolist(), images))
        ends.append(accelerator.gradient_state.end_of_dataloader)
    resumed += read(again)
    assert [order for order, _ in resumed] == [order for order, _ in expected]
    for (_, one), (_, other) in zip(resumed, expected, strict=True):
        assert torch.equal(one, other)
    assert ends == [False] * (NUM_BATCHES - saved_after - 1) + [True] * (
        saved_after < NUM_BATCHES
    )


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def test_what_is_sharded_already_is_not_sharded_again(accelerator: Accelerator) -> None:
    loader = build_loader()
    ours: Any = prepare(accelerator, loader)
    for again in (loader, ours):
        with pytest.raises(SettingError, match="is prepared already"):
            prepare(accelerator, again)
    assert len(list(ours)) == NUM_BATCHES


def test_what_cannot_be_sharded_is_refused(accelerator: Accelerator) -> None:
    with pytest.raises(SettingError, match="map-style"):
        prepare(accelerator, StreamPrefetchLoader(DataLoader(Stream(), 2)))
    with pytest.raises(SettingTypeError, match="is a list"):
        prepare(accelerator, StreamPrefetchLoader([1, 2]))
    prepared = accelerator.prepare(build_loader().source)
    with pytest.raises(SettingTypeError, match="not prepared yet"):
        prepare(accelerator, StreamPrefetchLoader(prepared))
    with pytest.raises(StateError, match="AcceleratedLoader"):
        prepare(accelerator, build_loader()).load_state_dict({"epoch": 1})


def test_wrong_arguments_are_named(accelerator: Accelerator) -> None:
    loader = build_loader()
    refused: list[tuple[Any, Any, str]] = [
        (accelerator, loader.source, "got Accelerator and DataLoader"),
        (loader, accelerator, "got StreamPrefetchLoader and Accelerator"),
        (None, loader, "got NoneType and StreamPrefetchLoader"),
    ]
    for one, other, got in refused:
        with pytest.raises(SettingTypeError, match=rf"{got}\. Write prepare\("):
            prepare(one, other)


def test_accelerate_passes_over_the_loader_itself(accelerator: Accelerator) -> None:
    """If it sharded it one day, the documentation should say so."""
    loader = build_loader()
    assert accelerator.prepare(loader) is loader


@pytest.mark.timeout(120)
def test_two_processes_share_the_data_and_not_the_augmentation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    worker = "tests/frameworks/accelerate_worker.py"
    torchrun(worker, "--out", str(tmp_path), num_ranks=2, limit_s=100)
    seen = [
        json.loads((tmp_path / f"accelerate-{rank}.json").read_text())
        for rank in (0, 1)
    ]
    for epoch in (0, 1):
        one, other = (set(rank["epochs"][epoch]) for rank in seen)
        assert one | other == set(range(NUM_SHARED))
        # One batch is given twice, so that both have as many.
        assert len(one & other) <= SHARED_BATCH
    assert seen[0]["epochs"][0] != seen[0]["epochs"][1]
    pixels = [*seen[0]["pixels"], *seen[1]["pixels"]]
    assert len(set(pixels)) == len(pixels)
    for rank in seen:
        num_batches = rank["length"]
        assert rank["ends"] == ([False] * (num_batches - 1) + [True]) * 2
        # Without what was given twice: each item once in each epoch.
        assert sorted(rank["gathered"]) == sorted([*range(NUM_SHARED)] * 2)
