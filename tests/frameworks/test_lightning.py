"""Does the loader serve Lightning's Trainer and Fabric, and do they resume exactly?"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kornia.augmentation as K
import lightning as L
import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from gpuprefetch import StreamPrefetchLoader
from gpuprefetch.integrations.lightning import LightningLoader

# What Lightning warns of is its own affair.
pytestmark = pytest.mark.filterwarnings("default")

NUM_EPOCHS = 3
NUM_BATCHES = 5
SAVED_AT = 7  # Steps: after the second batch of the second epoch.


def build_source() -> DataLoader[Any]:
    images = torch.arange(20 * 3 * 8 * 8).to(torch.uint8).reshape(20, 3, 8, 8)
    data = TensorDataset(images, torch.arange(20))
    return DataLoader(data, 4, sampler=DistributedSampler(data, 1, 0, seed=3))


class WithoutLength:
    """A source whose end is known when it comes, and which has no epochs to set.

    Lightning reads its first batch before it tells the epoch's number.
    """

    def __iter__(self) -> Iterator[Any]:
        return iter(DataLoader(build_source().dataset, 4))


class Recorder(L.LightningModule):
    """Notes what each training step gets; each step also changes a weight."""

    def __init__(self, build: Callable[[torch.device], Any]) -> None:
        super().__init__()
        self.build = build
        self.weight = nn.Parameter(torch.ones(()))
        self.steps: list[tuple[int, list[int], torch.Tensor]] = []
        self.before: Any = None
        self.num_copied = 0

    def train_dataloader(self) -> Any:
        return self.build(self.trainer.strategy.root_device)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.before = batch
        return batch

    def training_step(self, batch: Any, batch_index: int) -> torch.Tensor:
        images, labels = batch
        pairs = zip(batch, self.before, strict=True)
        self.num_copied += sum(one is not other for one, other in pairs)
        self.steps.append((self.current_epoch, labels.tolist(), images.cpu()))
        return self.weight * images.float().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(
    recorder: Recorder, folder: Path, *, accelerator: str = "cpu", **settings: Any
) -> Recorder:
    trainer = L.Trainer(
        max_epochs=NUM_EPOCHS,
        accelerator=accelerator,
        devices=1,
        callbacks=[
            ModelCheckpoint(
                folder, "{step}", every_n_train_steps=SAVED_AT, save_top_k=-1
            )
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(recorder, **settings)
    return recorder


def builder(
    kind: type[StreamPrefetchLoader[Any]] = LightningLoader,
    source: Callable[[], Any] = build_source,
    seed: int | None = 0,
) -> Callable[[torch.device], Any]:
    def build(device: torch.device) -> Any:
        return kind(source(), K.RandomRotation(90.0, p=1.0), device=device, seed=seed)

    return build


def bare_orders() -> list[list[int]]:
    """Labels of all batches, in the order of the bare loader."""
    source, orders = build_source(), []
    for epoch in range(NUM_EPOCHS):
        source.sampler.set_epoch(epoch)
        orders += [labels.tolist() for _, labels in source]
    return orders


def is_same(one: Recorder, other: Recorder, *, skip: int) -> bool:
    """Tell whether ``other`` took the steps of ``one`` from number ``skip`` on."""
    expected = one.steps[skip:]
    return len(expected) == len(other.steps) and all(
        a[:2] == b[:2] and torch.equal(a[2], b[2])
        for a, b in zip(expected, other.steps, strict=True)
    )


def test_each_epoch_has_the_order_of_the_bare_loader(tmp_path: Path) -> None:
    """Lightning's call of ``set_epoch`` reaches the sampler."""
    recorder = fit(Recorder(builder()), tmp_path)
    assert [labels for _, labels, _ in recorder.steps] == bare_orders()


def test_pixels_do_not_depend_on_the_trainer(tmp_path: Path) -> None:
    """Epoch 0 of the Trainer is epoch 0 of the loader."""
    recorder = fit(Recorder(builder()), tmp_path)
    loader = builder(StreamPrefetchLoader)(torch.device("cpu"))
    for number in range(NUM_EPOCHS * NUM_BATCHES):
        if number % NUM_BATCHES == 0:
            loader.sampler.set_epoch(number // NUM_BATCHES)
            batches = iter(loader)
        assert torch.equal(next(batches)[0], recorder.steps[number][2])


def test_nothing_is_copied_a_second_time(device: torch.device, tmp_path: Path) -> None:
    accelerator = "gpu" if device.type == "cuda" else "cpu"
    recorder = fit(Recorder(builder()), tmp_path, accelerator=accelerator)
    assert len(recorder.steps) == NUM_EPOCHS * NUM_BATCHES
    assert recorder.num_copied == 0


@pytest.mark.gpu
def test_meta_a_second_copy_is_seen(tmp_path: Path) -> None:
    plain = Recorder(lambda device: build_source())
    plain = fit(plain, tmp_path, accelerator="gpu")
    assert plain.num_copied == 2 * NUM_EPOCHS * NUM_BATCHES


@pytest.mark.parametrize("source", [build_source, WithoutLength])
def test_resume_from_a_checkpoint_is_exact(
    source: Callable[[], Any], tmp_path: Path
) -> None:
    whole = fit(Recorder(builder(source=source)), tmp_path)
    checkpoint = str(tmp_path / f"step={SAVED_AT}.ckpt")
    resumed = Recorder(builder(source=source))
    fit(resumed, tmp_path / "again", ckpt_path=checkpoint)
    assert is_same(whole, resumed, skip=SAVED_AT)
    assert torch.equal(whole.weight, resumed.weight)


def shuffled(generator: torch.Generator | None = None) -> DataLoader[Any]:
    data = build_source().dataset
    return DataLoader(data, 4, shuffle=True, generator=generator)


def resume_elsewhere(
    source: Callable[[], Any], tmp_path: Path
) -> tuple[Recorder, Recorder]:
    """Train whole, and from the checkpoint with torch's generator in another state."""
    torch.manual_seed(0)
    whole = fit(Recorder(builder(source=source)), tmp_path)
    torch.manual_seed(99)
    resumed = Recorder(builder(source=source))
    checkpoint = str(tmp_path / f"step={SAVED_AT}.ckpt")
    fit(resumed, tmp_path / "again", ckpt_path=checkpoint)
    return whole, resumed


@pytest.mark.parametrize(
    "source", [build_source, lambda: shuffled(torch.Generator().manual_seed(5))]
)
def test_a_resume_is_exact_in_later_epochs_if_the_order_is_the_samplers_own(
    source: Callable[[], Any], tmp_path: Path
) -> None:
    assert is_same(*resume_elsewhere(source, tmp_path), skip=SAVED_AT)


def test_a_bare_shuffle_resumes_the_epoch_and_not_later_ones(tmp_path: Path) -> None:
    """As documented: a Lightning checkpoint does not hold torch's generator."""
    whole, resumed = resume_elsewhere(shuffled, tmp_path)
    assert not is_same(whole, resumed, skip=SAVED_AT)
    num_later = NUM_BATCHES  # Of the third epoch.
    del whole.steps[-num_later:], resumed.steps[-num_later:]
    assert is_same(whole, resumed, skip=SAVED_AT)


def test_meta_a_state_that_counts_the_batch_read_ahead_is_seen(tmp_path: Path) -> None:
    """Of a source without a length: one reason for a LightningLoader."""
    build = builder(StreamPrefetchLoader, WithoutLength)
    whole = fit(Recorder(build), tmp_path)
    resumed = Recorder(build)
    checkpoint = str(tmp_path / f"step={SAVED_AT}.ckpt")
    fit(resumed, tmp_path / "again", ckpt_path=checkpoint)
    assert not is_same(whole, resumed, skip=SAVED_AT)


def test_meta_a_pass_that_begins_at_iter_is_seen(tmp_path: Path) -> None:
    """The Trainer drops its first one, so epochs count from 1: the other reason."""
    late = fit(Recorder(builder(StreamPrefetchLoader)), tmp_path)
    right = fit(Recorder(builder()), tmp_path / "right")
    assert not is_same(right, late, skip=0)


# Fabric #


def test_fabric_takes_the_inner_loader() -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    share = fabric.setup_dataloaders(build_source(), move_to_device=False)
    loader = StreamPrefetchLoader(share, device=fabric.device, background=True)
    got = [labels.tolist() for _ in range(NUM_EPOCHS) for _, labels in loader]
    assert got == bare_orders()
    assert len(loader) == NUM_BATCHES


def test_fabric_does_not_take_the_loader_itself() -> None:
    """If it did one day, the documentation should say so."""
    fabric = Fabric(accelerator="cpu", devices=1)
    with pytest.raises(TypeError, match="Only PyTorch DataLoader"):
        fabric.setup_dataloaders(StreamPrefetchLoader(build_source()))
