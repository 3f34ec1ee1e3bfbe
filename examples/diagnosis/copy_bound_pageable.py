"""A loop that packs its own batches: they arrive in pageable memory.

Needs a GPU. The source is a list of ordinary tensors, so the loop's thread copies each
of them into pinned memory before the device can fetch it.
"""

import torch

from gpuprefetch import StreamPrefetchLoader


def main() -> str:
    """Run 40 light steps over batches of 96 MiB and return the loader's report."""
    torch.set_num_threads(1)  # So that other processes on the cores matter less.
    ready = [torch.rand(128, 3, 256, 256) for _ in range(2)]
    weight = torch.ones(256, device="cuda", requires_grad=True)
    loader = StreamPrefetchLoader([ready[i % 2] for i in range(40)], device="cuda")
    for images in loader:
        (images * weight).mean().backward()
    return loader.report()


if __name__ == "__main__":
    if not torch.cuda.is_available():
        raise SystemExit("This loop shows itself on a GPU only, and torch sees none.")
    print(main())
