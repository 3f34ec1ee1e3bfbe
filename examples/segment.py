"""How do an image and its mask get the same random crop and rotation?

    python examples/segment.py

``inputs=`` names what the augmentation gets; ``data_keys`` says what each of them is.
The mask is sampled with the nearest neighbour, so no label is invented, and what
``inputs`` does not name (here the file name) passes by untouched.
"""

from typing import Any

import kornia.augmentation as K
import torch
from torch.utils.data import DataLoader, Dataset

from gpuprefetch import StreamPrefetchLoader
from gpuprefetch.workloads import PhotographDataset

IMAGE_SIZE = 64


class MaskedPhotographs(Dataset[dict[str, Any]]):
    """Photographs with a mask of their bright (1) and very bright (2) parts."""

    def __init__(self) -> None:
        self._photographs = PhotographDataset(IMAGE_SIZE, length=64)

    def __len__(self) -> int:
        return len(self._photographs)

    def __getitem__(self, index: int) -> dict[str, Any]:
        image, _ = self._photographs[index]
        brightness = image.float().mean(dim=0, keepdim=True)
        mask = (brightness > 100).long() + (brightness > 180).long()
        return {"image": image, "mask": mask, "name": f"photograph-{index}"}


def main() -> None:
    torch.manual_seed(0)
    augment = K.AugmentationSequential(
        K.RandomCrop((48, 48), p=1.0),
        K.RandomRotation(30.0, p=1.0),
        K.RandomGaussianBlur((5, 5), (0.1, 1.5), p=1.0),
        data_keys=["image", "mask"],
    )
    batches = StreamPrefetchLoader(
        DataLoader(MaskedPhotographs(), batch_size=16),
        transform=augment,
        inputs=("image", "mask"),
    )
    for batch in batches:
        image, mask = batch["image"], batch["mask"]
        labels = sorted(mask.unique().tolist())
        print(
            f"{batch['name'][0]}: image {tuple(image.shape)} {image.dtype}, "
            f"mask {tuple(mask.shape)} {mask.dtype} with labels {labels}"
        )


if __name__ == "__main__":
    main()
