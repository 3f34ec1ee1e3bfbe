"""A loop whose transform costs device time: few launches, each of them heavy.

Needs a GPU. The transform is a large blur, written as products of large matrices.
"""

import torch

from gpuprefetch import StreamPrefetchLoader


def main() -> str:
    """Run 40 light steps and return the loader's report."""
    torch.set_num_threads(1)  # So that other processes on the cores matter less.
    size = 4096
    blur = torch.softmax(torch.rand(size, size, device="cuda"), dim=1)

    def smooth(images: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            images = blur @ images @ blur
        return images

    weight = torch.ones(size, device="cuda", requires_grad=True)
    ready = [torch.rand(size, size).pin_memory()] * 40
    loader = StreamPrefetchLoader(ready, smooth, device="cuda")
    for images in loader:
        (images * weight).mean().backward()
    return loader.report()


if __name__ == "__main__":
    if not torch.cuda.is_available():
        raise SystemExit("This loop shows itself on a GPU only, and torch sees none.")
    print(main())
