"""How is the loader used with Hugging Face Accelerate?

    python examples/train_accelerate.py
    accelerate launch --num_processes 2 examples/train_accelerate.py

Model and optimizer are prepared as always; the loader by ``prepare`` of this package,
since ``accelerator.prepare`` would pass it over and share nothing out. On a machine
without GPUs, ``accelerate launch`` wants ``--cpu``.
"""

import kornia.augmentation as K
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

from gpuprefetch import StreamPrefetchLoader
from gpuprefetch.digits import (
    DEGREES,
    accuracy,
    build_digit_model,
    load_digits,
    rotate_digits,
)
from gpuprefetch.integrations.accelerate import prepare

STATED_ACCURACY = 0.75
NUM_EPOCHS = 6


def main() -> None:
    torch.set_num_threads(1)  # Digits are small: more threads cost more than they save.
    torch.manual_seed(0)
    accelerator = Accelerator()
    batch_size = 60 // accelerator.num_processes
    loader = StreamPrefetchLoader(
        DataLoader(load_digits("train"), batch_size, shuffle=True),
        transform=K.RandomRotation(DEGREES, p=1.0),
        device=accelerator.device,
        seed=0,
    )
    batches = prepare(accelerator, loader)
    model = build_digit_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.004)
    model, optimizer = accelerator.prepare(model, optimizer)

    for _ in range(NUM_EPOCHS):
        for images, labels in batches:
            with accelerator.accumulate(model):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                optimizer.step()

    scans, labels = load_digits("test").tensors
    rotated = accuracy(accelerator.unwrap_model(model), rotate_digits(scans), labels)
    accelerator.print(f"rotated digits read right: {rotated:.1%}")
    accelerator.end_training()
    if rotated < STATED_ACCURACY:
        raise SystemExit(f"missed the stated {STATED_ACCURACY:.0%}")


if __name__ == "__main__":
    main()
