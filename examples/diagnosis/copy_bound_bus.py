"""A loop that waits for the bus: its batches are pinned, and simply too large.

Needs a GPU. Images go over the bus as float32, four times the bytes that they were
stored in.
"""

import torch

from gpuprefetch import StreamPrefetchLoader


def main() -> str:
    """Run 40 light steps over batches of 384 MiB and return the loader's report."""
    torch.set_num_threads(1)  # So that other processes on the cores matter less.
    ready = [torch.rand(512, 3, 256, 256).pin_memory() for _ in range(2)]
    weight = torch.ones(256, device="cuda", requires_grad=True)
    loader = StreamPrefetchLoader([ready[i % 2] for i in range(40)], device="cuda")
    for images in loader:
        (images[:64] * weight).mean().backward()
    return loader.report()


if __name__ == "__main__":
    if not torch.cuda.is_available():
        raise SystemExit("This loop shows itself on a GPU only, and torch sees none.")
    print(main())
