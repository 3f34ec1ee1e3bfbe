"""How is the loader used with the Trainer of Hugging Face Transformers?

    python examples/train_hf_trainer.py

``get_train_dataloader`` returns the loader. Resuming needs a callback: the Trainer
would skip batches by building a plain DataLoader from the parts of ours, and that one
does not augment. So it is told to skip nothing (``ignore_data_skip=True``), and the
loader's own state, kept beside each checkpoint, says where to go on.
"""

import tempfile
from pathlib import Path
from typing import Any

import kornia.augmentation as K
import torch
from torch import nn
from torch.utils.data import DataLoader, default_collate
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

from gpuprefetch import StreamPrefetchLoader
from gpuprefetch.digits import (
    DEGREES,
    accuracy,
    build_digit_model,
    load_digits,
    rotate_digits,
)

STATED_ACCURACY = 0.7
NUM_EPOCHS = 6
STATE_FILE = "gpuprefetch-loader.pt"


class Reader(nn.Module):
    """Gives the loss along with the guesses, as the Trainer wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = build_digit_model()

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        logits = self.layers(images)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class KeepPlace(TrainerCallback):
    """Writes the loader's state beside each checkpoint."""

    def on_save(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        torch.save(parts["train_dataloader"].state_dict(), folder / STATE_FILE)


class PrefetchTrainer(Trainer):
    """Trains through the loader; goes on from ``place`` if there is one."""

    place: Path | None = None

    def get_train_dataloader(self) -> Any:
        def collate(items: Any) -> dict[str, torch.Tensor]:
            images, labels = default_collate(items)
            return {"images": images, "labels": labels}

        loader = StreamPrefetchLoader(
            DataLoader(self.train_dataset, 60, shuffle=True, collate_fn=collate),
            transform=K.RandomRotation(DEGREES, p=1.0),
            inputs="images",
            device=self.args.device,
            seed=0,
        )
        if self.place is not None:
            loader.load_state_dict(torch.load(self.place / STATE_FILE))
        return loader


def train(folder: str, resume_from: Path | None = None) -> Reader:
    """Train a model, from the start or from a checkpoint of an earlier run."""
    set_seed(0)
    settings = TrainingArguments(
        folder,
        num_train_epochs=NUM_EPOCHS,
        learning_rate=0.006,
        save_steps=30,
        ignore_data_skip=True,
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
        disable_tqdm=True,
    )
    model = Reader()
    trainer = PrefetchTrainer(
        model, settings, train_dataset=load_digits("train"), callbacks=[KeepPlace()]
    )
    trainer.place = resume_from
    trainer.train(resume_from_checkpoint=resume_from and str(resume_from))
    return model


def main() -> None:
    torch.set_num_threads(1)  # Digits are small: more threads cost more than they save.
    with tempfile.TemporaryDirectory() as folder:
        whole = train(folder)
        # As if the run above had been cut off in the middle of its second epoch.
        resumed = train(f"{folder}/again", Path(folder) / "checkpoint-30")

    pairs = zip(whole.parameters(), resumed.parameters(), strict=True)
    is_same = all(torch.equal(one, other) for one, other in pairs)
    scans, labels = load_digits("test").tensors
    rotated = accuracy(whole.layers, rotate_digits(scans), labels)
    print(f"rotated digits read right: {rotated:.1%}")
    print(f"resumed at step 30, same weights at the end: {is_same}")
    if rotated < STATED_ACCURACY or not is_same:
        raise SystemExit("that is not what this example states")


if __name__ == "__main__":
    main()
