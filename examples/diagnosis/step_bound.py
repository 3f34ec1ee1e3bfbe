"""A loop with nothing to gain: the training step takes nearly all of the time."""

import torch
from torch import nn

from gpuprefetch import StreamPrefetchLoader


def main() -> str:
    """Train for 40 steps and return the loader's report."""
    torch.set_num_threads(1)  # So that other processes on the cores matter less.
    device = "cuda" if torch.cuda.is_available() else "cpu"
    width = 256 if device == "cpu" else 8192
    layers = [nn.Linear(width, width) for _ in range(6)]
    model = nn.Sequential(*layers).to(device)
    ready = [torch.rand(256, width)] * 40
    loader = StreamPrefetchLoader(ready)
    for features in loader:
        model(features).square().mean().backward()
    return loader.report()


if __name__ == "__main__":
    print(main())
