"""How does an ordinary training loop use the loader?

    python examples/classify.py

Trains a small network on photographs; crop, rotation and blur are drawn anew for every
image, on the device. The only line that the loader changes is the ``for`` line.
"""

import kornia.augmentation as K
import torch
from torch import nn
from torch.utils.data import DataLoader

from gpuprefetch import StreamPrefetchLoader
from gpuprefetch.workloads import PhotographDataset, build_model

IMAGE_SIZE = 64
NUM_EPOCHS = 2


def main() -> None:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = accelerator or torch.device("cpu")
    torch.manual_seed(0)

    dataset = PhotographDataset(IMAGE_SIZE, length=160)
    loader = DataLoader(
        dataset, 16, shuffle=True, num_workers=1, pin_memory=device.type == "cuda"
    )
    # Leave it on the CPU: the loader runs it on the device, with numbers drawn on the
    # host. uint8 images arrive in it as float32 in [0, 1].
    augment = nn.Sequential(
        K.RandomCrop((32, 32), p=1.0),
        K.RandomRotation(45.0, p=1.0),
        K.RandomGaussianBlur((7, 7), (0.1, 2.0), p=1.0),
    )
    model = build_model(32, dataset.num_classes).to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    batches = StreamPrefetchLoader(loader, transform=augment)
    for epoch in range(NUM_EPOCHS):
        # Summed on the device; reading it each step would make the host wait each step.
        total = torch.zeros((), device=device)
        for x, y in batches:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        print(f"epoch {epoch}: mean loss {float(total) / len(batches):.3f}")
    print(batches.report())


if __name__ == "__main__":
    main()
