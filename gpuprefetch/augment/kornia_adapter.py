"""How does Kornia itself run inside a loader, where its work is not fused?

:class:`KorniaTransform` takes over a module that a user passed as ``transform``:

* it works on a copy, so the user's module never keeps a batch alive and may serve
  elsewhere at the same time;
* random parameters are drawn on the host, also if the module was moved to the device:
  there, drawing them makes the host wait for the device eight times in a usual chain;
* uint8 and uint16 images become float32 in [0, 1], since Kornia takes floats only;
* ranks are kept: (C, H, W) comes back as (C, h, w), a (B, H, W) mask as (B, h, w).

The only importer of kornia.
"""

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import nn

from gpuprefetch.augment.label_kinds import check_labels
from gpuprefetch.augment.shortcuts import BoxesOfCrop, shorten_crop, shorten_resize
from gpuprefetch.errors import (
    BatchError,
    DependencyError,
    ImageSizeError,
    TransformError,
)
from gpuprefetch.plural import counted, with_article
from gpuprefetch.seeding import BatchSeeds, generators_seeded

try:
    import kornia
    import kornia.augmentation
except ModuleNotFoundError as error:
    raise DependencyError(
        "Kornia is needed for this and is not installed. Run pip install 'kornia>=0.9'."
    ) from error

__all__ = [
    "KorniaTransform",
    "check_image",
    "default_device_cpu",
    "import_kornia",
]

_OLDEST = (0, 9)
# Whose draws and parameters the shortcuts were compared with.
_SHORTCUTS_FOR = (0, 9)

# What integer images are divided by.
_FULL_SCALE = {torch.uint8: 255.0, torch.uint16: 65535.0}

# What Kornia's modules remember of their last call.
_RUN_STATE = (
    "_params",
    "_transform_matrix",
    "_transform_matrices",
    "_lazy_matrix_args",
    "_output_image",
)

# `data_keys` whose tensors are images.
_IMAGE_KEYS = ("image", "input")


def import_kornia() -> ModuleType:
    """Give the module ``kornia.augmentation``.

    Raises:
        DependencyError: The installed Kornia is older than 0.9.
    """
    _check_version(kornia.__version__)
    return kornia.augmentation


def _check_version(version: str) -> None:
    if _major_minor(version) < _OLDEST:
        raise DependencyError(
            f"kornia {version} is installed, 0.9 or newer is needed: older ones make "
            "the host wait for the device over a hundred times per batch. Run "
            "pip install -U kornia."
        )


def _major_minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


class KorniaTransform:
    """A Kornia augmentation, container, or ``nn.Sequential`` of those, as a transform.

    Args:
        module: The user's module; it is copied as it is now.

    Raises:
        DependencyError: The installed Kornia is older than 0.9.
    """

    def __init__(self, module: Callable[..., Any]) -> None:
        assert isinstance(module, nn.Module)
        augmentation = import_kornia()
        self._module = _copy_without_run_state(module)
        for member in self._module.modules():
            _draw_on_host(member)
            _shorten(member, augmentation)
            if isinstance(member, augmentation.ImageSequential):
                # Otherwise the container keeps its last output alive.
                member.disable_features = True
        # None: a plain chain or augmentation, whose one input is the image.
        self._data_keys = getattr(self._module, "data_keys", None)

    def apply_batch(
        self, inputs: tuple[Any, ...], seeds: BatchSeeds, batch_index: int
    ) -> Any:
        """Augment one batch of a pass, as :meth:`apply_seeded` says."""
        return self.apply_seeded(inputs, seeds.of_batch(batch_index))

    def apply_seeded(self, inputs: tuple[Any, ...], seed: int) -> Any:
        """Augment one batch.

        Args:
            inputs: As many as the module has ``data_keys``; images are (B, C, H, W) or
                (C, H, W), uint8, uint16 or a float type; masks (B, C, H, W) or
                (B, H, W), any type; boxes and keypoints as Kornia takes them.
            seed: Of the batch; equal seeds give equal draws.

        Returns:
            One result, or a tuple of as many as there are inputs. Integer images come
            back as float32; everything else keeps its type and rank.

        Raises:
            BatchError: An image is of another type, or a label no tensor.
            ImageSizeError: A crop is larger than the image.
            TransformError: The number of inputs is not that of ``data_keys``.
        """
        with generators_seeded(seed, _device_of(inputs)):
            return self._apply(inputs, lambda *ready: self._module(*ready))

    def apply_drawn(self, inputs: tuple[Any, ...], params: Any) -> Any:
        """Augment one batch with parameters that were drawn already.

        Args:
            inputs: As in :meth:`apply_seeded`.
            params: As the module takes them; for an ``nn.Sequential``, a list of those.

        Returns:
            As :meth:`apply_seeded` does.
        """
        return self._apply(inputs, lambda *ready: _replay(self._module, params, *ready))

    def _apply(self, inputs: tuple[Any, ...], run: Callable[..., Any]) -> Any:
        """Make the inputs ready, run, and give the results the inputs' ranks."""
        if len(inputs) == 1 and isinstance(inputs[0], Mapping):
            with default_device_cpu():
                return run(_with_float_images(inputs[0]))
        self.check_count(inputs)
        keys = self._key_names()
        check_labels(keys, inputs)
        floats = tuple(
            _to_float(value) if key in _IMAGE_KEYS else value
            for key, value in zip(keys, inputs, strict=True)
        )
        with default_device_cpu():
            # A bool mask goes through as uint8: Kornia resamples numbers only.
            result = run(*(x.to(torch.uint8) if _is_bool(x) else x for x in floats))
        results = tuple(result) if len(keys) > 1 else (result,)
        # Kornia takes one image for a batch of one.
        is_one = results[0].ndim > floats[0].ndim
        restored = tuple(
            _restore(new, old, key=key, is_one=is_one)
            for new, old, key in zip(results, floats, keys, strict=True)
        )
        return restored if len(keys) > 1 else restored[0]

    @property
    def module(self) -> nn.Module:
        """The copy of the user's module, made ready for a loader."""
        return self._module

    def check_count(self, inputs: tuple[Any, ...]) -> None:
        """Refuse inputs that are not as many as the module has ``data_keys``.

        Raises:
            TransformError: They are not.
        """
        keys = self._key_names()
        if len(inputs) != len(keys):
            raise TransformError(
                f"{type(self._module).__name__} takes {counted(len(keys), 'input')} "
                f"({keys}), but got {len(inputs)}. Name as many in inputs=..., or "
                "pass an AugmentationSequential with data_keys for all of them."
            )

    def _key_names(self) -> list[str]:
        if self._data_keys is None:
            return ["image"]
        return [key.name.lower() for key in self._data_keys]

    def __repr__(self) -> str:
        members = [type(child).__name__ for child in self._module.children()]
        return f"KorniaTransform({', '.join(members) or type(self._module).__name__})"


# The copy #


def _copy_without_run_state(module: nn.Module) -> nn.Module:
    """Deep-copy a module without what it remembers of its last batch."""
    memo: dict[int, Any] = {}
    for member in module.modules():
        for name in _RUN_STATE:
            value = member.__dict__.get(name)
            if value is not None:
                empty = type(value)() if isinstance(value, (dict, list)) else None
                memo[id(value)] = empty
    return copy.deepcopy(module, memo)


def _draw_on_host(member: nn.Module) -> None:
    """Put a member's samplers on the CPU; its own weights stay where they are."""
    device = getattr(member, "device", None)
    move = getattr(member, "set_rng_device_and_dtype", None)
    if isinstance(device, torch.device) and device.type != "cpu" and callable(move):
        move(torch.device("cpu"), getattr(member, "dtype", torch.get_default_dtype()))


def _shorten(member: Any, augmentation: ModuleType) -> None:
    """Leave out what a member's work can do without; see ``shortcuts``."""
    is_known = _major_minor(kornia.__version__) == _SHORTCUTS_FOR
    draw = None
    if isinstance(member, augmentation.Resize) and is_known:
        shorten_resize(member, augmentation.Resize)
    if isinstance(member, augmentation.RandomCrop) and is_known:
        draw = shorten_crop(member, augmentation.RandomCrop)
    if isinstance(member, (augmentation.RandomCrop, augmentation.CenterCrop)):
        _refuse_upscaling(member, draw)


class _CheckedDraw:
    """Makes a crop larger than its image an error, where Kornia would enlarge it."""

    def __init__(self, crop: Any, draw: BoxesOfCrop | None) -> None:
        self._crop = crop
        self._draw = draw

    def __call__(self, batch_shape: tuple[int, ...]) -> Any:
        crop = self._crop
        height, width = crop.flags["size"]
        is_too_large = batch_shape[-2] < height or batch_shape[-1] < width
        if is_too_large and batch_shape[0] > 0:  # Kornia pads no empty batch.
            raise ImageSizeError(
                f"{type(crop).__name__}({height}, {width}) is larger than the image, "
                f"which is {batch_shape[-2]} x {batch_shape[-1]} (height x width) "
                "there. Use a smaller crop, a Resize before it, or pad_if_needed=True."
            )
        if self._draw is not None:
            return self._draw(batch_shape)
        return type(crop).generate_parameters(crop, batch_shape)


def _refuse_upscaling(crop: Any, draw: BoxesOfCrop | None) -> None:
    if "generate_parameters" not in vars(crop):  # Else the user has put another there.
        # On the instance, which is ours, so it takes the place of the class's method.
        crop.generate_parameters = _CheckedDraw(crop, draw)


def default_device_cpu() -> AbstractContextManager[Any]:
    """Keep parameters on the host under a default device that the user set."""
    if torch.get_default_device().type == "cpu":
        # The usual case; the context would cost time at each of some 200 operations.
        return nullcontext()
    return torch.device("cpu")


def _replay(module: nn.Module, params: Any, *inputs: Any) -> Any:
    """Call a module with parameters; a plain Sequential does not take them."""
    if type(module) is not nn.Sequential:
        return module(*inputs, params=params)
    (image,) = inputs
    for member, drawn in zip(module, params, strict=True):
        image = _replay(member, drawn, image)
    return image


# Inputs and results #


def check_image(image: Any) -> None:
    """Refuse what is no image.

    Raises:
        BatchError: It is no tensor, or one of another dtype.
    """
    if not isinstance(image, torch.Tensor):
        raise BatchError(
            "an image for a Kornia augmentation is "
            f"{with_article(type(image).__name__)}. Accepted "
            "are tensors (B, C, H, W) or (C, H, W); bring images to one size and stack "
            "them, and turn NumPy arrays into tensors with torch.from_numpy, in the "
            "collate function, or name another part of the batch with inputs=..."
        )
    if not image.is_floating_point() and image.dtype not in _FULL_SCALE:
        raise BatchError(
            f"an image for a Kornia augmentation is {image.dtype} with shape "
            f"{tuple(image.shape)}. Accepted are uint8 (scaled by 255), uint16 (by "
            "65535) and float types; convert the image in the dataset or name another "
            "part of the batch with inputs=..."
        )


def _to_float(image: Any) -> Any:
    check_image(image)
    if image.is_floating_point():
        return image
    return image.to(torch.float32).div_(_FULL_SCALE[image.dtype])


def _with_float_images(data: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the images of the dict that a container without data_keys takes."""
    return {
        key: _to_float(value) if key.lower().startswith(_IMAGE_KEYS) else value
        for key, value in data.items()
    }


def _restore(new: Any, old: Any, *, key: str, is_one: bool) -> Any:
    """Give a result the rank, and a mask the type, of the input it came from.

    Kornia adds a batch dimension in front of one image and what belongs to it, and one
    for channels to masks without. Labels stay as Kornia gives them: mixing two images
    gives labels of another rank.
    """
    if not isinstance(new, torch.Tensor) or not isinstance(old, torch.Tensor):
        return new
    while is_one and new.ndim > old.ndim and new.shape[0] == 1:
        new = new.squeeze(0)
    if key == "mask" and new.ndim > old.ndim:
        channels = 0 if is_one else 1
        new = new.squeeze(channels) if new.shape[channels] == 1 else new
    return new.to(torch.bool) if old.dtype is torch.bool else new


def _is_bool(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype is torch.bool


def _device_of(inputs: tuple[Any, ...]) -> torch.device:
    first = inputs[0]
    if isinstance(first, Mapping):
        first = next(
            (value for value in first.values() if isinstance(value, torch.Tensor)), None
        )
    return first.device if isinstance(first, torch.Tensor) else torch.device("cpu")
