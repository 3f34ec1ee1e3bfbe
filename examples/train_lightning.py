"""How is the loader used with Lightning's Trainer, and how does that resume?

    python examples/train_lightning.py

``train_dataloader()`` returns the loader; nothing else changes. Its batches lie on the
device already, so Lightning copies nothing a second time. Lightning keeps the loader's
state in its checkpoints and resumes from it, in the middle of an epoch too.
"""

import tempfile
from typing import Any

import kornia.augmentation as K
import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from gpuprefetch.digits import (
    DEGREES,
    accuracy,
    build_digit_model,
    load_digits,
    rotate_digits,
)
from gpuprefetch.integrations.lightning import LightningLoader

STATED_ACCURACY = 0.75
NUM_EPOCHS = 6


class Digits(L.LightningModule):
    """Learns rotated digits."""

    def __init__(self) -> None:
        super().__init__()
        self.model = build_digit_model()

    def train_dataloader(self) -> LightningLoader[Any]:
        digits = load_digits("train")
        # Lightning puts a DistributedSampler into a bare DataLoader only, so it is
        # written out; its set_epoch() is called by Lightning all the same.
        sampler = DistributedSampler(
            digits, self.trainer.world_size, self.trainer.global_rank, drop_last=True
        )
        return LightningLoader(
            DataLoader(digits, 60, sampler=sampler),
            transform=K.RandomRotation(DEGREES, p=1.0),
            device=self.trainer.strategy.root_device,
            seed=0,
        )

    def training_step(self, batch: Any, batch_index: int) -> torch.Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.model(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.004)


def build_trainer(folder: str, **settings: Any) -> L.Trainer:
    """Build a Trainer that keeps a checkpoint of every 10th step."""
    checkpoints = ModelCheckpoint(folder, every_n_train_steps=10, save_top_k=-1)
    return L.Trainer(
        max_epochs=NUM_EPOCHS,
        devices=1,
        callbacks=[checkpoints],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )


def main() -> None:
    torch.set_num_threads(1)  # Digits are small: more threads cost more than they save.
    with tempfile.TemporaryDirectory() as folder:
        L.seed_everything(0)
        whole = Digits()
        build_trainer(folder).fit(whole)

        # As if the run above had been cut off in the middle of its fourth epoch.
        resumed = Digits()
        checkpoint = f"{folder}/epoch=3-step=70.ckpt"
        build_trainer(f"{folder}/again").fit(resumed, ckpt_path=checkpoint)

    pairs = zip(whole.parameters(), resumed.parameters(), strict=True)
    is_same = all(torch.equal(one, other) for one, other in pairs)
    scans, labels = load_digits("test").tensors
    rotated = accuracy(whole.model, rotate_digits(scans), labels)
    print(f"rotated digits read right: {rotated:.1%}")
    print(f"resumed at step 70, same weights at the end: {is_same}")
    if rotated < STATED_ACCURACY or not is_same:
        raise SystemExit("that is not what this example states")


if __name__ == "__main__":
    main()
