"""Is what was named as boxes, keypoints or a mask of that kind?

Detection datasets give a dict for each image. Refused here, it is told by its keys, and
not by whatever fails first at an attribute that a dict does not have.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from gpuprefetch.errors import BatchError
from gpuprefetch.plural import with_article

__all__ = ["check_labels"]

# `data_keys` that are not moved with the pixels, or are the pixels.
_UNMOVED = ("image", "input", "label", "class")


def check_labels(keys: Sequence[str], values: Sequence[Any]) -> None:
    """Refuse a dict, or a list of dicts, where boxes, keypoints or a mask belong.

    Args:
        keys: Kornia's ``data_keys``, in lower case.
        values: What was given for each.

    Raises:
        BatchError: One of them is such.
    """
    for key, value in zip(keys, values, strict=True):
        if key not in _UNMOVED:
            _check(key, value)


def _check(key: str, label: Any) -> None:
    first = label[0] if isinstance(label, (list, tuple)) and label else label
    if not isinstance(first, Mapping):
        return
    what = type(first).__name__
    what = with_article(what) if first is label else f"a list of {what}"
    raise BatchError(
        f"{key} for a Kornia augmentation is {what}, with the keys {list(first)}. "
        "Accepted are a tensor and, for boxes and keypoints, a list with a tensor for "
        "each image. Make them an item of the batch of their own, in the collate "
        "function, and name that in inputs=..."
    )
