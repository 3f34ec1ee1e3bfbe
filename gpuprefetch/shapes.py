"""What does the shape of an image batch look like?"""

__all__ = ["looks_channels_last"]

# Last sizes that are rather channels than a width.
_CHANNELS = (1, 3, 4)


def looks_channels_last(shape: tuple[int, ...]) -> bool:
    """Tell whether a shape is rather (B, H, W, C) than (B, C, H, W)."""
    if len(shape) != 4 or shape[-1] not in _CHANNELS:
        return False
    return min(shape[1:3]) > max(_CHANNELS)
