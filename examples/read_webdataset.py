"""How does a stream of tar shards (webdataset) reach the loader?

    python examples/read_webdataset.py

A webdataset pipeline is an iterable data set: wrap it in a DataLoader, and that in the
loader. Decoding stays in the workers, augmentation goes to the device.
"""

import io
import tempfile
from pathlib import Path
from typing import Any

import kornia.augmentation as K
import torch
import webdataset
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader
from torchvision.transforms.v2 import functional as vision

from gpuprefetch import StreamPrefetchLoader
from gpuprefetch.workloads import PhotographDataset

IMAGE_SIZE = 64
NUM_SHARDS, SHARD_LENGTH = 2, 32


def write_shards(folder: Path) -> list[str]:
    """Write cut-outs of photographs as JPEG files into tar files."""
    photographs = PhotographDataset(IMAGE_SIZE, length=NUM_SHARDS * SHARD_LENGTH)
    paths = [str(folder / f"shard-{number}.tar") for number in range(NUM_SHARDS)]
    for number, path in enumerate(paths):
        with webdataset.TarWriter(path) as shard:
            for place in range(SHARD_LENGTH):
                image, label = photographs[number * SHARD_LENGTH + place]
                file = io.BytesIO()
                Image.fromarray(image.permute(1, 2, 0).numpy()).save(file, "jpeg")
                entry = {"jpg": file.getvalue(), "cls": str(label).encode()}
                shard.write({"__key__": f"{number}-{place:04d}", **entry})
    return paths


def decode(sample: dict[str, Any]) -> tuple[torch.Tensor, int]:
    """JPEG bytes to a (3, H, W) uint8 image, in a worker."""
    image = Image.open(io.BytesIO(sample["jpg"])).convert("RGB")
    return vision.pil_to_tensor(image), int(sample["cls"])


def main() -> None:
    torch.manual_seed(0)
    augment = nn.Sequential(
        K.RandomCrop((48, 48), p=1.0), K.RandomGaussianBlur((5, 5), (0.1, 2.0), p=1.0)
    )
    with tempfile.TemporaryDirectory() as folder:
        shards = write_shards(Path(folder))
        pipeline = webdataset.WebDataset(shards, shardshuffle=False).map(decode)
        source = DataLoader(pipeline, batch_size=16, num_workers=2)
        labels = []
        for images, batch_labels in StreamPrefetchLoader(source, augment, seed=0):
            print(f"{tuple(images.shape)} {images.dtype} on {images.device}")
            labels += batch_labels.tolist()
    print(f"{len(labels)} images of {len(set(labels))} photographs")


if __name__ == "__main__":
    main()
