"""How does ``kernel.cu`` get onto the device, and how is it launched?

The only file that imports ``cuda``. A variant is compiled by NVRTC the first time it is
needed (about a second) and kept twice: in the process, and as a cubin in the user's
cache folder, named by a digest of source, architecture and compiler. A launch goes to
torch's current stream and returns at once.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import logging
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpuprefetch.augment.lower import (
    Pixel,
    Tile,
    Variant,
    choose_tile,
    chunk_of,
    shared_bytes,
    write_header,
)
from gpuprefetch.augment.plan import (
    Launch,
    Outside,
    Plan,
    Resampling,
    Size,
    split_launches,
)

__all__ = ["PIXELS", "PlanKernel", "compile_cubin", "why_not"]

logger = logging.getLogger(__name__)

PIXELS: dict[torch.dtype, Pixel] = {
    torch.uint8: "u8",
    torch.uint16: "u16",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float32: "f32",
}
"""What the kernel calls each dtype that it reads; it writes the floating ones."""

_MAX_SAMPLES = 65535  # The grid's third axis.


@functools.cache
def why_not(device: torch.device) -> str:
    """Why the kernel cannot run on this device; empty: it can."""
    if device.type != "cuda":
        return f"it needs a CUDA device, not {device.type}"
    if torch.version.hip is not None:
        return "it needs an NVIDIA GPU"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs compute capability 8.0 or later"
    try:
        _nvrtc()
        _core()
    except ImportError as error:
        return f"it needs the package cuda-core ({error})"
    return ""


def _core() -> Any:
    return importlib.import_module("cuda.core")


def _nvrtc() -> Any:
    return importlib.import_module("cuda.bindings.nvrtc")


@functools.cache
def _kernel_source() -> str:
    return resources.files(__package__).joinpath("kernel.cu").read_text()


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "gpuprefetch" / "cubin"


def compile_cubin(header: str, arch: str, *, is_cached: bool = True) -> bytes:
    """Machine code of one variant, from the cache folder if it is there.

    Args:
        header: The ``#define`` lines of :func:`gpuprefetch.augment.lower.write_header`.
        arch: Such as ``"sm_90"``. No GPU is needed.
        is_cached: Whether to read and write the cache folder.
    """
    source = header + _kernel_source()
    version = ".".join(str(part) for part in _nvrtc().nvrtcVersion()[1:])
    digest = hashlib.sha256(f"{version} {arch}\n{source}".encode()).hexdigest()[:32]
    path = _cache_folder() / f"{digest}.cubin"
    if is_cached:
        try:
            return path.read_bytes()
        except OSError:
            pass  # Not there yet.
    core = _core()
    options = core.ProgramOptions(std="c++17", arch=arch)
    cubin = bytes(core.Program(source, "c++", options).compile("cubin").code)
    if is_cached:
        _keep(path, cubin)
    return cubin


def _keep(path: Path, cubin: bytes) -> None:
    """Write the file in one step, so that another process never reads half of it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as partial:
            partial.write(cubin)
        Path(partial.name).replace(path)
    except OSError as error:
        logger.info("compiled kernels are not kept on disk: %s", error)


@dataclass(frozen=True, slots=True)
class _Ready:
    """One launch, compiled and loaded, for one image size."""

    enqueue: Callable[..., None]
    """``cuda.core.launch`` without its stream: ``enqueue(stream, *arguments)``."""
    size: Size
    """Height and width of the result."""
    dtype: torch.dtype
    memory_format: torch.memory_format


class PlanKernel:
    """A plan's launches on CUDA devices. Callable from any stream of any device."""

    def __init__(self, plan: Plan, tile: Tile | None = None) -> None:
        self.plan = plan
        self.launches = split_launches(plan)
        self._tile = tile
        self._ready: dict[tuple[object, ...], tuple[_Ready, ...]] = {}

    def __call__(
        self,
        image: Tensor,
        pack: Tensor,
        *,
        dtype: torch.dtype,
        is_channels_last: bool,
        resampling: Resampling,
        outside: Outside,
    ) -> Tensor:
        """Enqueue the plan on the current stream.

        Args:
            image: (B, C, H, W) on a CUDA device, any strides, a dtype of ``PIXELS``.
            pack: (B, n), float32, contiguous, on the same device.
            dtype: Of the result: float16, bfloat16 or float32.
            is_channels_last: Memory format of the result.
            resampling: See :mod:`gpuprefetch.augment.plan`.
            outside: See :mod:`gpuprefetch.augment.plan`.

        Returns:
            (B, C, h, w), not readable on another stream before that one waits.
        """
        if image.device.index != torch.cuda.current_device():
            # A launch needs the context of its stream's device to be current.
            with torch.cuda.device(image.device):
                return self(
                    image,
                    pack,
                    dtype=dtype,
                    is_channels_last=is_channels_last,
                    resampling=resampling,
                    outside=outside,
                )
        key = (
            image.shape[1:],
            image.dtype,
            image.device,
            dtype,
            is_channels_last,
            resampling,
            outside,
        )
        ready = self._ready.get(key)
        if ready is None:
            ready = self._ready[key] = tuple(
                self._make_ready(
                    image, launch, dtype, is_channels_last, resampling, outside
                )
                for launch in self.launches
            )
        stream = _stream_of(torch.cuda.current_stream().cuda_stream, image.device)
        for step in ready:
            out = torch.empty(
                (image.shape[0], image.shape[1], *step.size),
                dtype=step.dtype,
                device=image.device,
                memory_format=step.memory_format,
            )
            for first in range(0, image.shape[0], _MAX_SAMPLES):
                rows = slice(first, first + _MAX_SAMPLES)
                whole = image.shape[0] <= _MAX_SAMPLES
                part, numbers, target = (
                    (image, pack, out)
                    if whole
                    else (image[rows], pack[rows], out[rows])
                )
                step.enqueue(
                    stream,
                    part.shape[0],
                    part.data_ptr(),
                    target.data_ptr(),
                    numbers.data_ptr(),
                    0,
                    *part.shape[2:],
                    *part.stride(),
                    *step.size,
                )
            image = out
        return image

    def _make_ready(
        self,
        image: Tensor,
        launch: Launch,
        dtype: torch.dtype,
        is_channels_last: bool,
        resampling: Resampling,
        outside: Outside,
    ) -> _Ready:
        """Compile, load and size one launch."""
        is_last = launch is self.launches[-1]
        is_first = launch is self.launches[0]
        output = PIXELS[dtype] if is_last else "f32"
        channels = image.shape[1]
        variant = Variant(
            channels,
            PIXELS[image.dtype] if is_first else "f32",
            output,  # type: ignore[arg-type]
            is_channels_last=is_channels_last and is_last,
            resampling=resampling,
            outside=outside,
        )
        size: Size = (image.shape[-2], image.shape[-1])
        tile = self._tile or choose_tile(self.plan, launch, variant, size)
        header = write_header(self.plan, launch, variant, tile)
        for step in self.plan.steps[: launch.last]:
            size = step.output_size(size)
        grid = (
            -(-size[1] // tile.x),
            -(-size[0] // tile.y) * -(-channels // chunk_of(channels)),
        )
        shared = shared_bytes(self.plan, launch, variant, tile)
        enqueue = _load(header, image.device, grid, tile.threads, shared)
        last_format = variant.is_channels_last
        return _Ready(
            enqueue,
            size,
            dtype if is_last else torch.float32,
            torch.channels_last if last_format else torch.contiguous_format,
        )


def _load(
    header: str, device: torch.device, grid: tuple[int, int], threads: int, shared: int
) -> Callable[..., None]:
    """Load a variant on a device and return what launches it."""
    core = _core()
    launch, make_config = core.launch, core.LaunchConfig
    kernel = _load_kernel(header, device, shared)
    configs: dict[int, Any] = {}

    def enqueue(stream: Any, samples: int, *arguments: int) -> None:
        config = configs.get(samples)
        if config is None:
            config = configs[samples] = make_config(
                grid=(*grid, samples), block=(threads, 1, 1), shmem_size=shared
            )
        launch(stream, config, kernel, *arguments)

    return enqueue


@functools.cache
def _load_kernel(header: str, device: torch.device, shared: int) -> Any:
    core = _core()
    driver = importlib.import_module("cuda.bindings.driver")
    major, minor = torch.cuda.get_device_capability(device)
    cubin = compile_cubin(header, f"sm_{major}{minor}")
    with torch.cuda.device(device):
        index = torch.cuda.current_device()
        core.Device(index).set_current()  # The context that torch uses too.
        kernel = core.ObjectCode.from_cubin(cubin).get_kernel("augment")
        if shared > 47 * 1024:  # With the static part, 48 KiB need no permission.
            (status,) = driver.cuKernelSetAttribute(
                driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                shared,
                kernel.handle,
                driver.CUdevice(index),
            )
            if status != driver.CUresult.CUDA_SUCCESS:
                raise RuntimeError(
                    f"the kernel needs {shared} bytes of shared memory, which "
                    f"{torch.cuda.get_device_name(index)} does not have: {status}"
                )
    return kernel


@functools.lru_cache(maxsize=64)
def _stream_of(handle: int, device: torch.device) -> Any:
    """The stream of a raw handle, as ``cuda.core`` wants it; torch keeps it alive."""
    core = _core()
    return core.Stream.from_handle(handle) if handle else core.LEGACY_DEFAULT_STREAM
