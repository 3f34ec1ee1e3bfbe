"""Draws resampling.png: one photograph, cropped, enlarged and turned in three ways.

Prints what docs/augmentation.md says of it: how far the first two are from each other,
by how much neighbouring pixels differ more (in the middle, which both fill), and noise.

python docs/images/resampling.py
"""

from pathlib import Path

import kornia.augmentation as K
import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.nn import functional as F

from gpuprefetch.augment import fuse
from gpuprefetch.workloads import load_photograph

CROP, WHOLE, LEFT, TOP = 64, 128, 38, 6


def print_differences(chained: torch.Tensor, single: torch.Tensor) -> None:
    """Compare two images (C, H, W) in [0, 1]."""
    decibel = -10 * torch.log10((chained - single).square().mean())
    middle = slice(WHOLE // 4, -WHOLE // 4)
    gain = contrast(single[:, middle, middle]) / contrast(chained[:, middle, middle])
    print(f"{decibel:.0f} dB; neighbouring pixels differ by {gain - 1:.0%} more")


def print_worst_case() -> None:
    """Compare both ways on noise, which no interpolation can follow."""
    chain = nn.Sequential(K.Resize((32, 40)), K.RandomRotation(30.0, p=1.0))
    noise = torch.rand(64, 3, 37, 53, generator=torch.Generator().manual_seed(0))
    chained, single = fuse(chain), fuse(chain, resampling="single")
    drawn = chained.sample(noise.shape, torch.Generator().manual_seed(0))
    params = chained.to_kornia(drawn)
    apart = (chained(noise, params=params) - single(noise, params=params)).abs()
    print(f"noise: pixels differ by {apart.mean():.2f} on average")


def contrast(image: torch.Tensor) -> float:
    """Give the mean difference of pixels beside each other and above each other."""
    return float(image.diff(dim=1).abs().mean() + image.diff(dim=2).abs().mean())


def main() -> None:
    photograph = load_photograph("astronaut")[None, :, 20:276, 120:376].float()
    image = F.interpolate(photograph, size=(WHOLE, WHOLE), mode="area")
    image = image.round().to(torch.uint8)
    chain = nn.Sequential(
        K.RandomCrop((CROP, CROP)),
        K.Resize((WHOLE, WHOLE)),
        K.RandomRotation((25.0, 25.0), p=1.0),
    )
    ways = {
        '"chained" (as Kornia)': fuse(chain),
        '"single", outside="zeros"': fuse(chain, resampling="single"),
        '"single", outside="extend"': fuse(
            chain, resampling="single", outside="extend"
        ),
    }
    crop, resize, turn = fuse(chain).to_kornia(fuse(chain).sample(image.shape))
    corners = torch.tensor([[0, 0], [1, 0], [1, 1], [0, 1]]) * (CROP - 1)
    crop["src"] = (corners + torch.tensor([LEFT, TOP])).float()[None]
    shown = {"the image; the crop is framed": image[0] / 255}
    for title, fused in ways.items():
        shown[title] = fused(image, params=[crop, resize, turn])[0]
    chained, single = list(shown.values())[1:3]
    print_differences(chained, single)
    print_worst_case()
    figure, axes = plt.subplots(1, 4, figsize=(9.2, 2.6), dpi=100)
    for axis, (title, pixels) in zip(axes, shown.items(), strict=True):
        axis.imshow(pixels.permute(1, 2, 0).clamp(0, 1), interpolation="nearest")
        axis.set_title(title, fontsize=8.5)
        axis.axis("off")
    frame = plt.Rectangle((LEFT - 0.5, TOP - 0.5), CROP, CROP, fill=False, ec="w")
    axes[0].add_patch(frame)
    figure.subplots_adjust(left=0.005, right=0.995, bottom=0.01, top=0.9, wspace=0.03)
    figure.savefig(Path(__file__).with_suffix(".png"))


if __name__ == "__main__":
    main()
