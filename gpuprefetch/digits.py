"""Which small real task is trained to a known accuracy within seconds?

Handwritten digits that scikit-learn ships: 1797 scans of 8x8 pixels. They are all
upright, so a model that is to read *rotated* digits depends on augmentation: without
it, it gets about two thirds of them right, and nine out of ten with it. Examples use
it, and the tests that ask whether training through the loader comes to the same end.

scikit-learn is imported when the digits are loaded. Nothing here knows of the loader.
"""

from typing import Literal

import torch
from torch import nn
from torch.utils.data import TensorDataset

from gpuprefetch.errors import DependencyError

__all__ = ["DEGREES", "accuracy", "build_digit_model", "load_digits", "rotate_digits"]

DEGREES = 45.0
"""Rotated digits are turned by up to so many degrees, to either side."""

_NUM_TRAINED = 1200  # The first ones. Writers are sorted, so the rest is other hands.
_BORDER = 2  # Pixels around each scan, so that a rotation cuts nothing off.
_BRIGHTEST = 16  # Of scikit-learn's scans.


def load_digits(part: Literal["train", "test"]) -> TensorDataset:
    """Load the digits of one part, none of which is in the other.

    Returns:
        1200 (train) or 597 (test) pairs of an image, (1, 12, 12), uint8, and its label,
        (), int64, in [0, 10). ``.tensors`` holds all of them at once.

    Raises:
        DependencyError: scikit-learn is not installed.
    """
    try:
        from sklearn import datasets
    except ImportError as error:
        raise DependencyError(
            "scikit-learn is not installed, and the digits come from it. "
            "Run: pip install scikit-learn"
        ) from error
    pixels, labels = datasets.load_digits(return_X_y=True)
    scans = torch.from_numpy(pixels).reshape(-1, 1, 8, 8) * (255 / _BRIGHTEST)
    images = nn.functional.pad(scans, [_BORDER] * 4).round().to(torch.uint8)
    chosen = slice(_NUM_TRAINED) if part == "train" else slice(_NUM_TRAINED, None)
    return TensorDataset(images[chosen], torch.from_numpy(labels).long()[chosen])


def rotate_digits(images: torch.Tensor) -> torch.Tensor:
    """Turn each image by its own angle in [-45, 45] degrees; the same at every call.

    Args:
        images: (B, 1, H, W), uint8.
    """
    generator = torch.Generator().manual_seed(0)
    angles = (torch.rand(len(images), generator=generator) * 2 - 1) * DEGREES
    cosines, sines = angles.deg2rad().cos(), angles.deg2rad().sin()
    zeros = torch.zeros_like(angles)
    rows = [cosines, -sines, zeros, sines, cosines, zeros]
    matrices = torch.stack(rows, dim=1).reshape(-1, 2, 3)
    grid = nn.functional.affine_grid(matrices, list(images.shape), align_corners=False)
    turned = nn.functional.grid_sample(images.float(), grid, align_corners=False)
    return turned.round().to(torch.uint8)


def build_digit_model() -> nn.Sequential:
    """Build a small convolutional network; its weights come from torch's generator.

    Returns:
        A module on the CPU, from (B, 1, 12, 12), float32 in [0, 1], to (B, 10).
    """
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 3 * 3, 10),
    )


@torch.no_grad()
def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Give the share of images that the model reads right, in [0, 1].

    Args:
        model: On any device; left in evaluation mode.
        images: (B, 1, 12, 12), uint8, on any device.
        labels: (B,), int64.
    """
    device = next(model.parameters()).device
    model.eval()
    guesses = model(images.to(device).float() / 255).argmax(dim=1)
    return float((guesses == labels.to(device)).float().mean())
