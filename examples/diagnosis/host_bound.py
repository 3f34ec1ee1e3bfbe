"""A loop whose step is limited by its own Python: many tiny layers.

Needs a GPU. The device is done with each launch before the next one arrives, so it has
run dry whenever the loop asks for a batch.
"""

import torch
from torch import nn

from gpuprefetch import StreamPrefetchLoader


def main() -> str:
    """Train for 60 steps and return the loader's report."""
    torch.set_num_threads(1)  # So that other processes on the cores matter less.
    layers = [nn.Linear(16, 16) for _ in range(300)]
    model = nn.Sequential(*layers).cuda()
    ready = [torch.rand(64, 16).pin_memory()] * 60
    loader = StreamPrefetchLoader(ready, torch.neg, device="cuda")
    for features in loader:
        loss = model(features).square().mean()
        loss.backward()
        loss.item()
    return loader.report()


if __name__ == "__main__":
    if not torch.cuda.is_available():
        raise SystemExit("This loop shows itself on a GPU only, and torch sees none.")
    print(main())
