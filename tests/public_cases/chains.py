"""Which augmentations does a case use that is not about one of them?"""

import kornia.augmentation as K
from torch import nn


def crop_rotate_blur(size: int, p: float = 0.5) -> nn.Sequential:
    """Build the chain that most cases use."""
    return nn.Sequential(
        K.RandomCrop((size, size)),
        K.RandomRotation(30.0, p=p),
        K.RandomGaussianBlur((3, 3), (0.1, 2.0), p=p),
    )
