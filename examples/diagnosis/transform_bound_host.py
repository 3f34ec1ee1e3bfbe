"""A loop whose transform costs host time: hundreds of small operations a batch.

On a GPU each of them is a launch from the loop's thread; on a CPU they simply run.
"""

import torch
from torch import nn

from gpuprefetch import StreamPrefetchLoader


def jitter_one_by_one(images: torch.Tensor) -> torch.Tensor:
    """Jitter each image on its own, as code written for one image does."""
    out = []
    for image in images:
        gain = torch.rand(1, device=images.device) + 0.5
        image = image * gain
        image = image + torch.rand(1, device=images.device) - 0.5
        image = (image - image.mean()) / (image.std() + 1e-3)
        out.append(image.flip(-1).clamp(-3, 3))
    return torch.stack(out)


def main() -> str:
    """Train for 40 steps and return the loader's report."""
    torch.set_num_threads(1)  # So that other processes on the cores matter less.
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(48, 4)).to(device)
    ready = [(torch.rand(64, 3, 32, 32), torch.arange(64) % 4)] * 40
    loader = StreamPrefetchLoader(ready, jitter_one_by_one)
    for images, labels in loader:
        nn.functional.cross_entropy(model(images), labels).backward()
    return loader.report()


if __name__ == "__main__":
    print(main())
