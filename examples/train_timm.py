"""How does a data set made for timm reach the loader, without timm's prefetcher?

    python examples/train_timm.py

``create_loader`` makes a ``PrefetchLoader`` around a DataLoader of uint8 batches. The
inner one is wrapped instead; normalizing, which the PrefetchLoader did, joins the
augmentation, and with it becomes one kernel on a GPU.
"""

from typing import Any

import kornia.augmentation as K
import timm
import torch
from timm.data import create_loader
from torch import nn
from torch.utils.data import Dataset
from torchvision.transforms.v2 import functional as vision

from gpuprefetch import StreamPrefetchLoader
from gpuprefetch.workloads import PhotographDataset

IMAGE_SIZE = 64
NUM_EPOCHS = 3
STATED_ACCURACY = 0.9


class PilPhotographs(Dataset[tuple[Any, int]]):
    """Photographs as PIL images, put through what timm sets as ``transform``."""

    transform: Any = None

    def __init__(self) -> None:
        self._photographs = PhotographDataset(IMAGE_SIZE, length=320)

    def __len__(self) -> int:
        return len(self._photographs)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image, label = self._photographs[index]
        return self.transform(vision.to_pil_image(image)), label


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = accelerator or torch.device("cpu")
    prefetcher = create_loader(
        PilPhotographs(),
        input_size=(3, IMAGE_SIZE, IMAGE_SIZE),
        batch_size=16,
        is_training=True,
        no_aug=True,  # timm resizes and crops in the workers; the rest is done below.
        num_workers=0,
        device=device,
    )
    mean, std = prefetcher.mean.flatten() / 255, prefetcher.std.flatten() / 255
    augment = nn.Sequential(
        K.RandomHorizontalFlip(),
        K.RandomRotation(30.0, p=1.0),
        K.Normalize(mean.float().cpu(), std.float().cpu()),
    )
    batches = StreamPrefetchLoader(prefetcher.loader, transform=augment, seed=0)

    model = timm.create_model(
        "test_efficientnet", num_classes=PhotographDataset.num_classes
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)
    for epoch in range(NUM_EPOCHS):
        num_right = torch.zeros((), device=device)
        for images, labels in batches:
            guesses = model(images)
            optimizer.zero_grad()
            nn.functional.cross_entropy(guesses, labels).backward()
            optimizer.step()
            num_right += (guesses.argmax(dim=1) == labels).sum()
        share = float(num_right) / (16 * len(batches))
        print(f"epoch {epoch}: {share:.1%} of the training batches right")
    if share < STATED_ACCURACY:
        raise SystemExit(f"missed the stated {STATED_ACCURACY:.0%}")


if __name__ == "__main__":
    main()
