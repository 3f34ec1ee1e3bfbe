"""Copies and augments the next batch on a side stream while the model trains.

    from gpuprefetch import StreamPrefetchLoader

    for x, y in StreamPrefetchLoader(loader, transform=augment):
        loss = criterion(model(x), y)

Importing this loads torch, and none of Kornia, CUDA's Python packages, matplotlib,
Lightning or Accelerate.
"""

from gpuprefetch.errors import (
    BatchError,
    BatchWarning,
    DependencyError,
    ForkedError,
    GpuPrefetchError,
    ImageSizeError,
    SelectionError,
    SettingError,
    SettingTypeError,
    StateError,
    SupersededError,
    TraceError,
    TransformError,
)
from gpuprefetch.loader import StreamPrefetchLoader
from gpuprefetch.stats import LoaderStats

__all__ = [
    "BatchError",
    "BatchWarning",
    "DependencyError",
    "ForkedError",
    "GpuPrefetchError",
    "ImageSizeError",
    "LoaderStats",
    "SelectionError",
    "SettingError",
    "SettingTypeError",
    "StateError",
    "StreamPrefetchLoader",
    "SupersededError",
    "TraceError",
    "TransformError",
]

__version__ = "0.1.0"

# What users may import beside those names; all other modules are ours.
_PUBLIC_MODULES = ["augment", "integrations", "ranges", "testing", "workloads"]


def __dir__() -> list[str]:
    """List what is public and can be had: a module, once it is imported."""
    public = {*__all__, *_PUBLIC_MODULES, "__version__"}
    return sorted(public & globals().keys())
