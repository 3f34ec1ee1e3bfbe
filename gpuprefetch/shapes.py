"""What does the shape of an image batch look like?"""

__all__ = ["looks_channels_last", "looks_gray"]

# Sizes that are rather channels than a width, or than a number of images.
_CHANNELS = (1, 3, 4)


def looks_channels_last(shape: tuple[int, ...]) -> bool:
    """Tell whether a shape is rather (B, H, W, C) than (B, C, H, W)."""
    if len(shape) != 4 or shape[-1] not in _CHANNELS:
        return False
    return min(shape[1:3]) > max(_CHANNELS)


def looks_gray(shape: tuple[int, ...]) -> bool:
    """Tell whether a shape may be (B, H, W), and not only (C, H, W)."""
    return len(shape) == 3 and shape[0] not in _CHANNELS
