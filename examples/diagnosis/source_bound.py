"""A loop that waits for its source: decoding takes longer than the training step.

Every image is decoded and sorted by brightness in the loop's own process, as with
``DataLoader(num_workers=0)`` and a heavy ``__getitem__``.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from gpuprefetch import StreamPrefetchLoader


class HeavyImages(Dataset):
    """Takes about a millisecond for an image of 64 x 64."""

    def __len__(self) -> int:
        return 40 * 8

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = torch.rand(3, 64, 64, generator=torch.Generator().manual_seed(index))
        for _ in range(4):
            image = image.flatten().sort().values.view(3, 64, 64)
        return image, index % 4


def main() -> str:
    """Train for 40 steps and return the loader's report."""
    torch.set_num_threads(1)  # So that other processes on the cores matter less.
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(192, 4)).to(device)
    loader = StreamPrefetchLoader(DataLoader(HeavyImages(), batch_size=8))
    for images, labels in loader:
        nn.functional.cross_entropy(model(images), labels).backward()
    return loader.report()


if __name__ == "__main__":
    print(main())
