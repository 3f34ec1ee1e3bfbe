"""Are the arguments of the loader sound, and what do their defaults stand for?"""

import operator
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from gpuprefetch.errors import SettingError, SettingTypeError
from gpuprefetch.kinds import (
    is_array,
    is_fused_module,
    is_hashable,
    is_kornia_module,
)
from gpuprefetch.plural import counted, with_article

__all__ = ["Settings", "check_source", "parse_device", "parse_int", "resolve_device"]

# Keys of a dict that a message lists.
_MOST_KEYS = 10


@dataclass(frozen=True, slots=True)
class Settings:
    """The keyword arguments of ``StreamPrefetchLoader``, checked."""

    transform: Callable[..., Any] | None
    """Called with the batch's inputs on the device."""
    inputs: Hashable | None
    """Index, key, field, or a tuple of those; ``None`` for the default input."""
    batch_transform: Callable[[Any], Any] | None
    """Called with the whole batch on the device."""
    device: torch.device | None
    """As given, maybe without an index; ``None`` for the current accelerator."""
    depth: int
    """Most batches pulled or issued and not yet yielded, at least 1."""
    background: bool | None
    """Whether a thread pulls the source; ``None`` decides by the source."""
    seed: int | None
    """Base seed; ``None`` takes one from torch's generator at each pass."""
    replay: bool | None
    """Whether a resumed pass loads again what was yielded; ``None``: to be exact."""

    @property
    def function(self) -> Callable[..., Any] | None:
        """What runs on the device: ``transform`` or ``batch_transform``."""
        return self.batch_transform if self.transform is None else self.transform

    def __post_init__(self) -> None:
        self._check_transforms()
        self._check_inputs()
        if self.depth < 1:
            raise SettingError(
                f"depth must be at least 1, got {self.depth}. To prefetch nothing, "
                "iterate the DataLoader itself."
            )
        for name in ("background", "replay"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, bool):
                raise SettingTypeError(
                    f"{name} must be True, False or None (decide by the source), got "
                    f"{value!r}."
                )

    def _check_transforms(self) -> None:
        for name in ("transform", "batch_transform"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise SettingTypeError(
                    f"{name} must be callable, got {type(value).__name__}. Pass a "
                    "function or a torch.nn.Module; for several in a row, an "
                    "nn.Sequential."
                )
            if isinstance(value, type):
                raise SettingTypeError(
                    f"{name} is the class {value.__qualname__}, not an instance. "
                    f"Pass {value.__qualname__}(...)."
                )
        if self.transform is not None and self.batch_transform is not None:
            raise SettingError(
                "transform and batch_transform were both given. Pass transform for a "
                "function of the inputs, or batch_transform for one of the whole batch."
            )
        if _takes_images(self.batch_transform):
            name = type(self.batch_transform).__name__
            raise SettingError(
                f"batch_transform gets the whole batch, and a {name} takes images. "
                "Pass it as transform=, with inputs=... where the images are not the "
                "batch's first item."
            )

    def _check_inputs(self) -> None:
        if self.inputs is None:
            return
        if self.transform is None:
            raise SettingError(
                f"inputs={self.inputs!r} says what transform gets, but there is no "
                "transform. Pass transform=..., or leave inputs out (batch_transform "
                "always gets the whole batch)."
            )
        names = self.inputs if isinstance(self.inputs, tuple) else (self.inputs,)
        if not names:
            raise SettingError(
                "inputs is an empty tuple. Name at least one index, key or field, or "
                "pass None for the default input."
            )
        if any(not is_hashable(n) or isinstance(n, bool) for n in names):
            raise SettingTypeError(
                f"inputs must be an index, a key, a field name, or a tuple of those, "
                f"got {self.inputs!r}. Pass {_usable_instead(self.inputs)}."
            )
        if len(set(names)) < len(names):
            raise SettingError(
                f"inputs={self.inputs!r} names the same input twice, and it could be "
                "replaced by one result only. Name each input once."
            )


def _usable_instead(inputs: object) -> str:
    if isinstance(inputs, list) and inputs and all(map(is_hashable, inputs)):
        return f"inputs={tuple(inputs)!r}"
    return "inputs=0 or inputs='image', for example"


def _takes_images(function: object) -> bool:
    """Tell what runs Kornia on images, and not on a dict, which may be a batch."""
    if is_fused_module(function):
        return not cast(Any, function).runs_as_is
    if not is_kornia_module(function):
        return False
    members = cast(nn.Module, function).modules()
    return all(getattr(member, "data_keys", ()) is not None for member in members)


def check_source(source: object) -> None:
    """Refuse what gives no batches.

    Raises:
        SettingTypeError: It cannot be iterated, is a ``Dataset``, or text; or what it
            gives is keys, rows, modules or DataLoaders.
    """
    if isinstance(source, (str, bytes, bytearray)):
        raise SettingTypeError(
            "source must be a DataLoader or another iterable of batches, got the "
            f"{type(source).__name__} {source[:40]!r}, which holds none. Pass the "
            "DataLoader that reads the data, not the name of a file."
        )
    mistaken = _describe_mistaken(source)
    if mistaken:
        raise SettingTypeError(
            "source must be a DataLoader or another iterable of batches, got "
            f"{mistaken}"
        )
    is_sequence = hasattr(source, "__getitem__") and not isinstance(source, Dataset)
    if not isinstance(source, Iterable) and not is_sequence:
        raise SettingTypeError(
            "source must be a DataLoader or another iterable of batches, got "
            f"{type(source).__name__}. Wrap a Dataset in a DataLoader first."
        )


def _describe_mistaken(source: object) -> str:
    """Say what can be iterated and gives no batches, and what to pass; else empty."""
    came = with_article(type(source).__qualname__)
    if isinstance(source, Mapping):
        return (
            f"{came} with the keys {list(islice(source, _MOST_KEYS))}, which gives its "
            "keys. Pass one of its values, if those are DataLoaders; of a dict of "
            "tensors, make a Dataset and wrap it in a DataLoader."
        )
    if isinstance(source, torch.Tensor) or is_array(source):
        return (
            f"{came}, which gives its rows. Pass DataLoader(TensorDataset(images, "
            "labels), batch_size=...), or iter(...) of it if its rows are batches."
        )
    if isinstance(source, nn.Module):
        return (
            f"the module {type(source).__qualname__}. Pass the DataLoader first, and "
            "the module as transform=."
        )
    if isinstance(source, (list, tuple)) and source and all(map(_is_loader, source)):
        return (
            f"{came} of {counted(len(source), 'DataLoader')}. Pass one of them, or one "
            "DataLoader over ConcatDataset([...]) of their datasets."
        )
    return ""


def _is_loader(value: object) -> bool:
    return isinstance(value, DataLoader)


def parse_int(name: str, value: Any) -> int:
    """Read any integer, NumPy's among them, as Python's own, which states hold.

    Raises:
        SettingTypeError: It is none; a bool, a tensor or an array is not meant as one.
    """
    try:
        if isinstance(value, (bool, torch.Tensor)) or is_array(value):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise SettingTypeError(
            f"{name} must be an int, got {type(value).__name__} ({value!r}). Pass "
            f"{name}=2, for example."
        ) from None


def parse_device(device: object) -> torch.device | None:
    """Read the ``device`` argument.

    Raises:
        SettingError: torch knows no such device.
        SettingTypeError: It is of a type that names no device.
    """
    if device is None or isinstance(device, torch.device):
        return device
    if isinstance(device, bool) or not isinstance(device, (str, int)):
        raise SettingTypeError(
            "device must be a torch.device, a string such as 'cuda' or 'cuda:1', an "
            f"int or None (the current accelerator), got {type(device).__name__}."
        )
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise SettingError(
            f"device={device!r} is not a device that torch knows. Pass 'cuda', "
            "'cuda:1' or 'cpu', for example, or None for the current accelerator."
        ) from error


def resolve_device(device: torch.device | None) -> torch.device:
    """Say where batches go, with the index that is current now.

    Args:
        device: As the user gave it; ``None`` for the current accelerator, or the CPU
            where there is none.

    Raises:
        SettingError: The device is not available on this machine.
    """
    if device is None:
        if not torch.accelerator.is_available():
            return torch.device("cpu")
        device = torch.accelerator.current_accelerator()
        assert device is not None
    if device.type in ("cpu", "meta"):
        return torch.device(device.type)
    try:
        module = torch.get_device_module(device)
        is_available = module.is_available()
    except RuntimeError:
        # torch knows the name, but nothing that implements it is installed.
        is_available = False
    if not is_available:
        raise SettingError(
            f"device={str(device)!r} is not available here (torch {torch.__version__} "
            f"sees no {device.type} device). Pass device='cpu', or None for whatever "
            "there is."
        )
    if device.type == "mps":
        return torch.device("mps", 0)
    if device.index is None:
        return torch.device(device.type, module.current_device())
    if device.index >= module.device_count():
        raise SettingError(
            f"device={str(device)!r} does not exist: there are "
            f"{module.device_count()} {device.type} devices, counted from 0."
        )
    return device
