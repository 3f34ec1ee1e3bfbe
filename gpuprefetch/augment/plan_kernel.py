"""How does a plan run on a CUDA device?

A launch goes to torch's current stream and returns at once; it takes the driver's own
call, since the host's time per batch counts.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gpuprefetch.augment.column import Size
from gpuprefetch.augment.kernel import PIXELS, Loaded, load_kernel
from gpuprefetch.augment.launches import Launch, mean_launch, split_launches
from gpuprefetch.augment.lower import write_header
from gpuprefetch.augment.plan import Plan
from gpuprefetch.augment.tile import choose_tile, shared_bytes
from gpuprefetch.augment.values import Grayscale
from gpuprefetch.augment.variant import How, Tile, Variant, chunk_of

__all__ = ["KernelCall", "PlanKernel"]

_DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in PIXELS.items()}

_MAX_SAMPLES = 65535  # The grid's third axis.
_MOST_CALLS = 256  # Kinds of images remembered per plan; for each a few hundred bytes.


KernelCall = Callable[[Tensor, Tensor], Tensor]
"""``call(image, pack)`` enqueues all launches on the current stream."""


class _Launcher:
    """One launch, compiled and loaded, for images of one shape and stride.

    The arguments lie in memory of this object, since building them anew costs more than
    the launch; a lock keeps two threads from writing them at once. The driver has
    copied them when ``enqueue`` returns.
    """

    def __init__(
        self,
        kernel: Loaded,
        grid: tuple[int, int, int],
        threads: int,
        shared: int,
        numbers: tuple[int, ...],
        num_sums: int = 0,
    ) -> None:
        self._kernel = kernel
        self._config = (*grid, threads, 1, 1, shared)
        # In the order of the kernel's parameters: image, result, pack, images of
        # different sizes (none), then the numbers. All have 64 bits. Where the kernel
        # reads the sums of a mean launch, their address and count are the last two.
        all_numbers = (*numbers, 0, num_sums) if num_sums else numbers
        count = 4 + len(all_numbers)
        self._values = (ctypes.c_longlong * count)(0, 0, 0, 0, *all_numbers)
        first = ctypes.addressof(self._values)
        addresses = [first + 8 * index for index in range(len(self._values))]
        self._pointers = (ctypes.c_void_p * len(addresses))(*addresses)
        self._pointer = ctypes.addressof(self._pointers)
        self._lock = threading.Lock()

    def enqueue(
        self, stream: int, image: int, out: int, pack: int, sums: int = 0
    ) -> None:
        """Launch on a raw stream, with raw addresses on the device."""
        kernel, values = self._kernel, self._values
        with self._lock:
            values[0], values[1], values[2] = image, out, pack
            if sums:
                values[-2] = sums
            (status,) = kernel.launch(
                kernel.function, *self._config, stream, self._pointer, 0
            )
        if status != 0:
            raise RuntimeError(f"the fused kernel could not be launched: {status!r}")


@dataclass(frozen=True, slots=True)
class _Stage:
    """One launch, and the tensor that it fills."""

    launcher: _Launcher
    shape: tuple[int, int, int, int]
    dtype: torch.dtype
    memory_format: torch.memory_format
    means: _Means | None


@dataclass(frozen=True, slots=True)
class _Means:
    """The mean launch before a launch, and how many sums it leaves per sample."""

    launcher: _Launcher
    num_sums: int


class PlanKernel:
    """A plan's launches on CUDA devices. Callable from any stream of any device."""

    def __init__(self, plan: Plan, tile: Tile | None = None) -> None:
        self.plan = plan
        self.launches = split_launches(plan)
        self._tile = tile
        self._calls: dict[tuple[object, ...], KernelCall | None] = {}

    def __call__(self, image: Tensor, pack: Tensor, how: How) -> Tensor:
        """Enqueue the plan on the current stream.

        Args:
            image: (B, C, H, W) on a CUDA device, any strides, a dtype of ``PIXELS``.
            pack: (B, n), float32, contiguous, on the same device.
            how: Type, layout and resampling of the result.

        Returns:
            (B, C, h, w), not readable on another stream before that one waits.
        """
        call = self.find(image, how)
        assert call is not None, "the kernel does not take such images"
        return call(image, pack)

    def find(self, image: Tensor, how: How) -> KernelCall | None:
        """Give what enqueues the plan for images like this one; compiles if needed.

        Returns:
            None where the kernel cannot read the image.
        """
        key = (image.shape, image.stride(), image.dtype, image.device, how)
        try:
            return self._calls[key]
        except KeyError:
            pass
        if len(self._calls) >= _MOST_CALLS:
            self._calls.clear()
        call = self._calls[key] = self._make_call(image, how)
        return call

    def why_not(self, image: Tensor) -> str:
        """Why the kernel cannot take images of this shape; empty: it can."""
        if not _fits_32_bits(image):
            return "one image takes more than 2^31 elements"
        channels = image.shape[1]
        if chunk_of(channels) != channels and self._weighs_all_channels:
            return f"a block has at most 4 of the {channels} channels of a pixel"
        return ""

    @property
    def _weighs_all_channels(self) -> bool:
        return any(isinstance(step, Grayscale) for step in self.plan.steps)

    def _make_call(self, image: Tensor, how: How) -> KernelCall | None:
        if image.dtype not in PIXELS or self.why_not(image):
            return None
        if image.shape[0] > _MAX_SAMPLES:

            def in_parts(image: Tensor, pack: Tensor) -> Tensor:
                parts = zip(
                    torch.split(image, _MAX_SAMPLES),
                    torch.split(pack, _MAX_SAMPLES),
                    strict=True,
                )
                return torch.cat([self(*part, how) for part in parts])

            return in_parts
        stages: list[_Stage] = []
        device, size = image.device, (image.shape[-2], image.shape[-1])
        for launch in self.launches:
            is_last = launch is self.launches[-1]
            variant = Variant(
                image.shape[1],
                PIXELS[image.dtype],
                PIXELS[how.dtype] if is_last else "f32",  # type: ignore[arg-type]
                is_channels_last=how.is_channels_last and is_last,
                resampling=how.resampling,
                outside=how.outside,
            )
            stages.append(self._make_stage(image, launch, variant, device, size))
            # Stands for the result: only shape, strides, dtype and device are read.
            last = stages[-1]
            image = torch.empty(
                last.shape,
                dtype=last.dtype,
                device="meta",
                memory_format=last.memory_format,
            )
        return functools.partial(_run_stages, tuple(stages))

    def _make_stage(
        self,
        image: Tensor,
        launch: Launch,
        variant: Variant,
        device: torch.device,
        first_size: Size,
    ) -> _Stage:
        """Compile, load and size one launch; the plan gets images of ``first_size``."""
        means = None
        before = mean_launch(self.plan, launch)
        if before is not None:
            plain = replace(variant, output="f32", is_channels_last=False)
            launcher, tiles, _ = self._make_launcher(
                image, before, plain, device, first_size
            )
            means = _Means(launcher, tiles)
        launcher, _, size = self._make_launcher(
            image, launch, variant, device, first_size, means.num_sums if means else 0
        )
        return _Stage(
            launcher,
            (image.shape[0], image.shape[1], *size),
            _DTYPES[variant.output],
            torch.channels_last
            if variant.is_channels_last
            else torch.contiguous_format,
            means,
        )

    def _make_launcher(
        self,
        image: Tensor,
        launch: Launch,
        variant: Variant,
        device: torch.device,
        first_size: Size,
        num_sums: int = 0,
    ) -> tuple[_Launcher, int, Size]:
        """The launch, how many blocks it has per sample, and the size of its frame."""
        batch, channels, height, width = image.shape
        tile = self._tile or choose_tile(self.plan, launch, variant, first_size)
        size: Size = (height, width)
        for step in self.plan.steps[launch.first : launch.last]:
            size = step.output_size(size)
        grid = (
            -(-size[1] // tile.x),
            -(-size[0] // tile.y) * -(-channels // chunk_of(channels)),
            batch,
        )
        shared = shared_bytes(self.plan, launch, variant, tile)
        kernel = load_kernel(
            write_header(self.plan, launch, variant, tile), device, shared
        )
        numbers = (height, width, *image.stride(), *size)
        launcher = _Launcher(kernel, grid, tile.threads, shared, numbers, num_sums)
        return launcher, grid[0] * grid[1], size


def _run_stages(stages: tuple[_Stage, ...], image: Tensor, pack: Tensor) -> Tensor:
    device = image.device
    if device.index != torch._C._cuda_getDevice():
        # A launch needs the context of its stream's device to be current.
        with torch.cuda.device(device):
            return _run_stages(stages, image, pack)
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    numbers = pack.data_ptr()
    for stage in stages:
        out = torch.empty(
            stage.shape,
            dtype=stage.dtype,
            device=device,
            memory_format=stage.memory_format,
        )
        if stage.shape[0]:
            address, sums = image.data_ptr(), 0
            if stage.means is not None:
                # Of this stream like the images: freed here, it is not written again
                # before the launch has read it.
                count = stage.shape[0] * stage.means.num_sums
                buffer = torch.empty(count, dtype=torch.float32, device=device)
                sums = buffer.data_ptr()
                stage.means.launcher.enqueue(stream, address, sums, numbers)
            stage.launcher.enqueue(stream, address, out.data_ptr(), numbers, sums)
        image = out
    return image


def _fits_32_bits(image: Tensor) -> bool:
    """Whether one sample's pixels lie within 2^31 elements; the batch may be larger."""
    reach = sum(
        (size - 1) * stride
        for size, stride in zip(image.shape[1:], image.stride()[1:], strict=True)
    )
    return reach < 2**31
