"""How does a frozen encoder run beside the training of its head?

    python examples/frozen_encoder.py

The encoder is the ``transform``: batch n+1 is encoded on the side stream while the head
trains on batch n. It runs without gradients; what the loop gets are features. Its
weights must not change during a pass (see docs/hand-off.md).

On a GPU and with small batches an encoder's launches take longer than its work. Then
``transform=GraphedTransform(encode)`` replays them as one (see docs/augmentation.md).
"""

import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision.models import resnet18

from gpuprefetch import StreamPrefetchLoader
from gpuprefetch.workloads import PhotographDataset

IMAGE_SIZE = 64


def build_encoder() -> nn.Module:
    """A ResNet-18 without its head, frozen; here with random weights."""
    encoder = nn.Sequential(*list(resnet18().children())[:-2])
    return encoder.eval().requires_grad_(False)


def main() -> None:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = accelerator or torch.device("cpu")
    torch.manual_seed(0)

    dataset = PhotographDataset(IMAGE_SIZE, length=80)
    encoder = build_encoder().to(device)

    def encode(images: torch.Tensor) -> torch.Tensor:
        """uint8 images, on the device, to features of 512 channels."""
        return encoder(images.float() / 255)

    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 8))
    head.to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)

    batches = StreamPrefetchLoader(DataLoader(dataset, 16), transform=encode)
    for epoch in range(2):
        total = torch.zeros((), device=device)
        for features, y in batches:
            optimizer.zero_grad()
            loss = criterion(head(features), y)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        print(f"epoch {epoch}: mean loss {float(total) / len(batches):.3f}")


if __name__ == "__main__":
    main()
