"""Does the loader serve the Trainer of Transformers, and why is resuming special?"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from gpuprefetch import StreamPrefetchLoader

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("default")


class Recorder(nn.Module):
    """Notes each batch that the Trainer passes it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.batches: list[torch.Tensor] = []

    def forward(self, pixels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.batches.append(pixels)
        return {"loss": self.weight * pixels.float().mean()}


class PrefetchTrainer(transformers.Trainer):
    def get_train_dataloader(self) -> Any:
        self.yielded: list[torch.Tensor] = []

        def mark(pixels: torch.Tensor) -> torch.Tensor:
            self.yielded.append(pixels + 1000)
            return self.yielded[-1]

        return StreamPrefetchLoader(
            DataLoader(self.train_dataset, 4), mark, inputs="pixels", device="cpu"
        )


def build_trainer(folder: Path, **settings: Any) -> PrefetchTrainer:
    arguments = transformers.TrainingArguments(
        str(folder),
        num_train_epochs=2,
        save_steps=3,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **settings,
    )
    data = [{"pixels": torch.tensor(float(i))} for i in range(16)]
    return PrefetchTrainer(Recorder(), arguments, train_dataset=data)


def test_the_trainer_gets_our_very_batches(tmp_path: Path) -> None:
    trainer = build_trainer(tmp_path)
    trainer.train()
    assert len(trainer.model.batches) == 8
    for got, yielded in zip(trainer.model.batches, trainer.yielded, strict=True):
        assert got is yielded


def test_skipping_goes_past_the_loader(tmp_path: Path) -> None:
    """Why the documentation asks for ``ignore_data_skip``; if it changes, say so."""
    build_trainer(tmp_path).train()
    trainer = build_trainer(tmp_path / "again")
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert trainer.model.batches[0].min() < 1000, "a batch without our transform"
