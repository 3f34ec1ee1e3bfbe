"""How is the loader used with Lightning Fabric?

    python examples/train_fabric.py

``fabric.setup_dataloaders`` takes a bare ``DataLoader`` only, and would copy each batch
in the loop. So it gets the *inner* one, told to leave the batches where they are, and
the loader goes around it, with Fabric's device.
"""

import kornia.augmentation as K
import torch
from lightning.fabric import Fabric
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

STATED_ACCURACY = 0.75
NUM_EPOCHS = 6


def main() -> None:
    torch.set_num_threads(1)  # Digits are small: more threads cost more than they save.
    fabric = Fabric(devices=1)
    fabric.launch()
    fabric.seed_everything(0)

    model = build_digit_model()
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), 0.004))
    share = fabric.setup_dataloaders(
        DataLoader(load_digits("train"), 60, shuffle=True), move_to_device=False
    )
    batches = StreamPrefetchLoader(
        share, K.RandomRotation(DEGREES, p=1.0), device=fabric.device, seed=0
    )
    for _ in range(NUM_EPOCHS):
        for images, labels in batches:
            optimizer.zero_grad()
            fabric.backward(nn.functional.cross_entropy(model(images), labels))
            optimizer.step()

    scans, labels = load_digits("test").tensors
    rotated = accuracy(model, rotate_digits(scans), labels)
    print(f"rotated digits read right: {rotated:.1%}")
    if rotated < STATED_ACCURACY:
        raise SystemExit(f"missed the stated {STATED_ACCURACY:.0%}")


if __name__ == "__main__":
    main()
