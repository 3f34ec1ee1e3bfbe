"""What do the demo, the tests and the benchmarks train on?

One small image-classification job, so that their numbers can be compared: photographs
that scikit-image ships, a crop-resize-rotate-blur-normalize chain written for three
places, and a convolutional model of nine layers.

- In a worker, one image at a time: :func:`worker_chain` (torchvision).
- On the device, a batch at a time, by hand: :func:`batch_chain` (torchvision).
- On the device, a batch at a time: :func:`kornia_chain`, the one to hand to the loader.

All three take the same sizes and draw from the same ranges; they differ in how they
draw. scikit-image and Kornia are imported when they are needed. Nothing here knows of
the loader.
"""

import random
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset
from torchvision import ops
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as vision

from gpuprefetch.errors import DependencyError, SettingError

__all__ = [
    "PHOTOGRAPHS",
    "PhotographDataset",
    "TrainingStep",
    "batch_chain",
    "build_model",
    "kornia_chain",
    "load_photograph",
    "to_unit_float",
    "worker_chain",
]

PHOTOGRAPHS = (
    "astronaut",
    "chelsea",
    "coffee",
    "rocket",
    "stereo_motorcycle",
    "retina",
    "hubble_deep_field",
    "immunohistochemistry",
)
"""Functions of ``skimage.data`` whose colour photograph lies inside its wheel."""

SMALLEST_IMAGE = 16  # Pixels. The blur reflects three pixels at the border.

_DEGREES = 45.0  # Rotation is uniform in [-_DEGREES, _DEGREES].
_BLUR_SIZE = 7  # Pixels.
_BLUR_SIGMA = (0.1, 2.0)  # Pixels; uniform.
_MEAN, _STD = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)

_FIRST_CHANNELS = 16
_MOST_HALVINGS = 8  # With the first 1x1 convolution: nine layers, at 256 pixels.


# Data #


def load_photograph(name: str) -> torch.Tensor:
    """Read one of :data:`PHOTOGRAPHS` from the installed scikit-image.

    Returns:
        (3, H, W), uint8, contiguous, on the CPU. H and W differ between photographs.

    Raises:
        SettingError: ``name`` is not in :data:`PHOTOGRAPHS`.
        DependencyError: scikit-image is not installed.
    """
    if name not in PHOTOGRAPHS:
        raise SettingError(
            f"there is no photograph {name!r}. Choose one of {', '.join(PHOTOGRAPHS)}."
        )
    loaded: Any = getattr(_import_photographs(), name)()
    # The stereo pair comes as (left, right, disparity); the left one is kept.
    pixels = loaded[0] if isinstance(loaded, tuple) else loaded
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1).contiguous()


def _import_photographs() -> Any:
    try:
        import skimage.data
    except ImportError as error:
        raise DependencyError(
            "scikit-image is not installed, and the photographs come from it. "
            "Run: pip install 'gpuprefetch-torch[demo]'"
        ) from error
    return skimage.data


class PhotographDataset(Dataset[tuple[torch.Tensor, int]]):
    """Square cut-outs of eight photographs; the label says which photograph it was.

    The photographs are read and resized once, here, so that forked workers share them.
    Item ``i`` is the same pixels in every process and every run.

    Args:
        image_size: Height and width of an item in pixels, at least 16.
        transform: Called on each (3, image_size, image_size) uint8 image.
        length: Number of items.
    """

    num_classes = len(PHOTOGRAPHS)

    def __init__(
        self, image_size: int = 256, *, transform: Any = None, length: int = 65_536
    ) -> None:
        _check_image_size(image_size)
        # A quarter larger than an item, so that cut-outs differ yet show the subject.
        shorter_side = image_size + image_size // 4
        self.image_size = image_size
        self.transform = transform
        self._length = length
        self._photographs = [
            vision.resize(load_photograph(name), [shorter_side], antialias=True)
            for name in PHOTOGRAPHS
        ]

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        """Return the image, (3, image_size, image_size), and its label in [0, 8).

        Raises:
            IndexError: ``index`` is not in [0, length).
        """
        if not 0 <= index < self._length:
            raise IndexError(f"index {index} is outside [0, {self._length})")
        draw = random.Random(index)
        label = draw.randrange(self.num_classes)
        photograph = self._photographs[label]
        size = self.image_size
        top = draw.randint(0, photograph.shape[-2] - size)
        left = draw.randint(0, photograph.shape[-1] - size)
        # A copy of its own: the worker must not send the whole photograph along.
        image = photograph[:, top : top + size, left : left + size].clone()
        return (image if self.transform is None else self.transform(image)), label


# Augmentation #


def to_unit_float(images: torch.Tensor) -> torch.Tensor:
    """Scale uint8 in [0, 255] to float32 in [0, 1], on the images' own device."""
    return images.float().div_(255)


def worker_chain(image_size: int, *, scale: bool = True) -> nn.Module:
    """Build the chain for one (3, image_size, image_size) uint8 image in a worker.

    Args:
        image_size: Height and width, in pixels.
        scale: Bring pixels to [0, 1]; else they stay in [0, 255].

    Returns:
        A module that returns float32 of the same shape.
    """
    _check_image_size(image_size)
    return nn.Sequential(
        v2.ToDtype(torch.float32, scale=scale),
        v2.RandomCrop(image_size // 2),
        v2.Resize(image_size, antialias=True),
        v2.RandomRotation(_DEGREES),
        v2.GaussianBlur(_BLUR_SIZE, _BLUR_SIGMA),
        v2.Normalize(_MEAN, _STD),
    )


def batch_chain(image_size: int, *, scale: bool = True) -> nn.Module:
    """Build the chain as one writes it by hand for a batch on the device.

    Crop and rotation draw once per image, the blur once per batch.

    Args:
        image_size: Height and width, in pixels.
        scale: Bring pixels to [0, 1]; else they stay in [0, 255].

    Returns:
        A module from (B, 3, image_size, image_size), uint8, to float32 of that shape.
    """
    _check_image_size(image_size)
    return nn.Sequential(
        v2.ToDtype(torch.float32, scale=scale),
        _BatchCrop(image_size // 2),
        v2.Resize(image_size, antialias=True),
        _BatchRotation(_DEGREES),
        v2.GaussianBlur(_BLUR_SIZE, _BLUR_SIGMA),
        v2.Normalize(_MEAN, _STD),
    )


def kornia_chain(image_size: int) -> nn.Sequential:
    """Build the chain from Kornia's modules; every step draws once per image.

    It takes float images. The loader scales uint8 by itself; elsewhere, put
    :func:`to_unit_float` before it.

    Returns:
        A module, to be left on the CPU, from (B, 3, image_size, image_size), float, on
        any device, to the same shape, dtype and device.

    Raises:
        DependencyError: Kornia is missing or older than 0.9.
    """
    # Here, since that file loads Kornia.
    from gpuprefetch.augment.kornia_adapter import import_kornia

    _check_image_size(image_size)
    kornia = import_kornia()
    half, whole = image_size // 2, image_size
    return nn.Sequential(
        kornia.RandomCrop((half, half), p=1.0),
        kornia.Resize((whole, whole)),
        kornia.RandomRotation(_DEGREES, p=1.0),
        kornia.RandomGaussianBlur((_BLUR_SIZE, _BLUR_SIZE), _BLUR_SIGMA, p=1.0),
        kornia.Normalize(torch.tensor(_MEAN), torch.tensor(_STD)),
    )


class _BatchCrop(nn.Module):
    """Cut a square out of each image, at a place of its own."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """(B, C, H, W), float, to (B, C, size, size)."""
        batch_size, _, height, width = images.shape
        top = self._draw(batch_size, height, images.device)
        left = self._draw(batch_size, width, images.device)
        number = torch.arange(batch_size, device=images.device)
        corners = [number, left, top, left + self.size, top + self.size]
        boxes = torch.stack(corners, dim=1).to(images.dtype)
        cut: torch.Tensor = ops.roi_align(images, boxes, self.size)
        return cut

    def _draw(self, count: int, extent: int, device: torch.device) -> torch.Tensor:
        return torch.randint(extent - self.size + 1, (count,), device=device)


class _BatchRotation(nn.Module):
    """Rotate each image by an angle of its own, one image after the other."""

    def __init__(self, degrees: float) -> None:
        super().__init__()
        self.degrees = degrees

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """(B, C, H, W) to the same shape."""
        angles = (random.uniform(-self.degrees, self.degrees) for _ in images)
        turned = [
            vision.rotate(image, angle)
            for image, angle in zip(images, angles, strict=True)
        ]
        return torch.stack(turned)


# Model #


def build_model(image_size: int = 256, num_classes: int = 10) -> nn.Sequential:
    """Build a stack of convolutions that each halve the image and double the channels.

    At 256 pixels it has nine convolutions and ends with 4096 channels. A smaller image
    can be halved less often, so its model has fewer layers. The weights start from He's
    rule: without it, and without normalization layers, so deep a stack hardly learns.

    Returns:
        A module on the CPU, from (B, 3, image_size, image_size), float, to (B,
        num_classes).
    """
    _check_image_size(image_size)
    num_halvings = min(_MOST_HALVINGS, image_size.bit_length() - 1)
    channels = _FIRST_CHANNELS
    layers: list[nn.Module] = [nn.Conv2d(3, channels, kernel_size=1)]
    for _ in range(num_halvings):
        halve = nn.Conv2d(channels, 2 * channels, kernel_size=2, stride=2)
        layers += [nn.ReLU(inplace=True), halve]
        channels *= 2
    for layer in layers:
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    side = image_size >> num_halvings
    return nn.Sequential(
        *layers, nn.Flatten(), nn.Linear(channels * side * side, num_classes)
    )


class TrainingStep:
    """One step of plain SGD with cross-entropy, without a host synchronization.

    Args:
        model: Trained in place; already on its device.
        learning_rate: Of SGD, without momentum.
    """

    def __init__(self, model: nn.Module, *, learning_rate: float = 0.005) -> None:
        self._model = model
        self._loss = nn.CrossEntropyLoss()
        self._optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)

    def __call__(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Train on one batch.

        Args:
            images: (B, 3, H, W), float, on the model's device.
            labels: (B,), int64, on the model's device.

        Returns:
            The loss before the step: a scalar on the device, without a graph.
        """
        self._optimizer.zero_grad()
        loss: torch.Tensor = self._loss(self._model(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return loss.detach()


def _check_image_size(image_size: int) -> None:
    if image_size < SMALLEST_IMAGE:
        raise SettingError(
            f"image_size must be at least {SMALLEST_IMAGE} pixels, got {image_size}."
        )
