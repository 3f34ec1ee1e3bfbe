"""What can go wrong, and how is each kind told apart?

    GpuPrefetchError
    ├── SettingError       (ValueError)    a constructor argument has a wrong value
    ├── SettingTypeError   (TypeError)     a constructor argument has a wrong type
    ├── BatchError         (TypeError)     a batch or a leaf of it cannot be handled
    ├── SelectionError     (LookupError)   ``inputs`` does not fit the batch
    ├── TransformError     (ValueError)    the transform's result does not fit the batch
    ├── ImageSizeError     (ValueError)    a crop is larger than the image
    ├── StateError         (ValueError)    a saved state cannot be loaded here
    ├── SupersededError    (RuntimeError)  a newer pass took over the source's iterator
    ├── TraceError         (ValueError)    a file is not a profiler's trace of a GPU
    ├── ForkedError        (RuntimeError)  a pass went on in a forked child process
    └── DependencyError    (ImportError)   a package is missing or too old

Each derives from the built-in kind as well, so code that catches ``ValueError`` around
a DataLoader keeps working. Errors raised by the user's own dataset, collate function or
transform are passed on as they are.
"""

__all__ = [
    "BatchError",
    "BatchWarning",
    "DependencyError",
    "ForkedError",
    "GpuPrefetchError",
    "ImageSizeError",
    "SelectionError",
    "SettingError",
    "SettingTypeError",
    "StateError",
    "SupersededError",
    "TraceError",
    "TransformError",
]


class GpuPrefetchError(Exception):
    """Base of every error that this package raises by itself."""


class SettingError(GpuPrefetchError, ValueError):
    """A constructor argument has a value that is not accepted."""


class SettingTypeError(GpuPrefetchError, TypeError):
    """A constructor argument has a type that is not accepted."""


class BatchError(GpuPrefetchError, TypeError):
    """A batch, or the leaf that the message names by its path, cannot be handled."""


class SelectionError(GpuPrefetchError, LookupError):
    """``inputs`` names something that the batch does not have, or is needed here."""


class TransformError(GpuPrefetchError, ValueError):
    """The transform returned something that cannot take its inputs' place."""


class ImageSizeError(GpuPrefetchError, ValueError):
    """A crop is larger than the image it should cut from."""


class StateError(GpuPrefetchError, ValueError):
    """A saved state is of another version or cannot be applied to this source."""


class SupersededError(GpuPrefetchError, RuntimeError):
    """A newer pass over the same source iterator ended this one."""


class ForkedError(GpuPrefetchError, RuntimeError):
    """A pass was continued in a forked child, which has no feeder thread."""


class TraceError(GpuPrefetchError, ValueError):
    """A file is not a trace of ``torch.profiler``, or shows nothing of a GPU."""


class DependencyError(GpuPrefetchError, ImportError):
    """A package that the requested feature needs is missing or too old."""


class BatchWarning(UserWarning):
    """Something in a batch was left where it was; the message names it by its path."""
