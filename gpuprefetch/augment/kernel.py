"""How does ``kernel.cu`` get onto the device, and how is it launched?

The only file that imports ``cuda``. A variant is compiled by NVRTC the first time it is
needed (about a second) and kept twice: in the process, and as a cubin in the user's
cache folder, named by a digest of source, architecture and compiler. A launch goes to
torch's current stream and returns at once; it takes the driver's own call, since the
host's time per batch counts.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import logging
import os
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpuprefetch.augment.lower import write_header
from gpuprefetch.augment.plan import Launch, Plan, split_launches
from gpuprefetch.augment.steps import Size
from gpuprefetch.augment.tile import choose_tile, shared_bytes
from gpuprefetch.augment.variant import How, Pixel, Tile, Variant, chunk_of

__all__ = ["PIXELS", "KernelCall", "PlanKernel", "compile_cubin", "why_not"]

logger = logging.getLogger(__name__)

PIXELS: dict[torch.dtype, Pixel] = {
    torch.uint8: "u8",
    torch.uint16: "u16",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float32: "f32",
}
"""What the kernel calls each dtype that it reads; it writes the floating ones."""

_DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in PIXELS.items()}

_MAX_SAMPLES = 65535  # The grid's third axis.
_MOST_CALLS = 256  # Kinds of images remembered per plan; for each a few hundred bytes.


@functools.cache
def why_not(device: torch.device) -> str:
    """Why the kernel cannot run on this device; empty: it can."""
    if device.type != "cuda":
        return f"it needs a CUDA device, not {device.type}"
    if torch.version.hip is not None:
        return "it needs an NVIDIA GPU"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return "it needs compute capability 8.0 or later"
    return _why_no_compiler(capability)


def _why_no_compiler(capability: tuple[int, int]) -> str:
    try:
        nvrtc = _nvrtc()
        # The first call loads the library, which may be missing where the package is
        # not, and says so with an error of its own.
        status, known = nvrtc.nvrtcGetSupportedArchs()
        _core()
    except ImportError as error:
        return f"it needs the package cuda-core ({error})"
    except Exception as error:
        return f"NVRTC cannot be loaded ({error})"
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        return f"NVRTC does not work ({status})"
    number = capability[0] * 10 + capability[1]
    if number not in known:
        return f"this NVRTC does not know sm_{number}; it knows {list(known)}"
    return ""


def _core() -> Any:
    return importlib.import_module("cuda.core")


def _nvrtc() -> Any:
    return importlib.import_module("cuda.bindings.nvrtc")


@functools.cache
def _kernel_source() -> str:
    return resources.files(__package__).joinpath("kernel.cu").read_text()


def _cache_folder() -> Path:
    """The user's own; relative where the user has none, as in some containers."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
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
    kept = _kept(path) if is_cached else None
    if kept is not None:
        return kept
    core = _core()
    options = core.ProgramOptions(std="c++17", arch=arch)
    cubin = bytes(core.Program(source, "c++", options).compile("cubin").code)
    if is_cached:
        _keep(path, cubin)
    return cubin


def _checksum(cubin: bytes) -> bytes:
    return hashlib.sha256(cubin).digest()


def _kept(path: Path) -> bytes | None:
    """The code in a file of the cache; None: it is not there, or damaged."""
    if not path.is_absolute():
        return None
    try:
        content = path.read_bytes()
    except OSError:
        return None
    checksum, cubin = content[:32], content[32:]
    # A crash of the machine can leave a file of zeros behind a finished rename.
    return cubin if checksum == _checksum(cubin) else None


def _keep(path: Path, cubin: bytes) -> None:
    """Write the file in one step, so that another process never reads half of it."""
    if not path.is_absolute():
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as partial:
            try:
                partial.write(_checksum(cubin) + cubin)
                partial.close()
                Path(partial.name).replace(path)
            except OSError:  # Such as a full disk: leave nothing there.
                Path(partial.name).unlink(missing_ok=True)
                raise
    except OSError as error:
        logger.info("compiled kernels are not kept on disk: %s", error)


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
        kernel: _Loaded,
        grid: tuple[int, int, int],
        threads: int,
        shared: int,
        numbers: tuple[int, ...],
    ) -> None:
        self._kernel = kernel
        self._config = (*grid, threads, 1, 1, shared)
        # In the order of the kernel's parameters: image, result, pack, images of
        # different sizes (none), then the numbers. All have 64 bits.
        self._values = (ctypes.c_longlong * (4 + len(numbers)))(0, 0, 0, 0, *numbers)
        first = ctypes.addressof(self._values)
        addresses = [first + 8 * index for index in range(len(self._values))]
        self._pointers = (ctypes.c_void_p * len(addresses))(*addresses)
        self._pointer = ctypes.addressof(self._pointers)
        self._lock = threading.Lock()

    def enqueue(self, stream: int, image: int, out: int, pack: int) -> None:
        """Launch on a raw stream, with raw addresses on the device."""
        kernel, values = self._kernel, self._values
        with self._lock:
            values[0], values[1], values[2] = image, out, pack
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

    def _make_call(self, image: Tensor, how: How) -> KernelCall | None:
        if image.dtype not in PIXELS or not _fits_32_bits(image):
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
        kernel = _load_kernel(
            write_header(self.plan, launch, variant, tile), device, shared
        )
        numbers = (height, width, *image.stride(), *size)
        return _Stage(
            _Launcher(kernel, grid, tile.threads, shared, numbers),
            (batch, channels, *size),
            _DTYPES[variant.output],
            torch.channels_last
            if variant.is_channels_last
            else torch.contiguous_format,
        )


def _run_stages(stages: tuple[_Stage, ...], image: Tensor, pack: Tensor) -> Tensor:
    device = image.device
    if device.index != torch.cuda.current_device():
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
            stage.launcher.enqueue(stream, image.data_ptr(), out.data_ptr(), numbers)
        image = out
    return image


def _fits_32_bits(image: Tensor) -> bool:
    """Whether one sample's pixels lie within 2^31 elements; the batch may be larger."""
    reach = sum(
        (size - 1) * stride
        for size, stride in zip(image.shape[1:], image.stride()[1:], strict=True)
    )
    return reach < 2**31


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A kernel in the memory of one device."""

    launch: Callable[..., tuple[Any, ...]]
    """The driver's ``cuLaunchKernel``."""
    function: Any
    module: Any
    """Keeps the code loaded."""


@functools.cache
def _load_kernel(header: str, device: torch.device, shared: int) -> _Loaded:
    core = _core()
    driver = importlib.import_module("cuda.bindings.driver")
    major, minor = torch.cuda.get_device_capability(device)
    cubin = compile_cubin(header, f"sm_{major}{minor}")
    with torch.cuda.device(device):
        index = torch.cuda.current_device()
        core.Device(index).set_current()  # The context that torch uses too.
        module = core.ObjectCode.from_cubin(cubin)
        kernel = module.get_kernel("augment")
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
    # The driver launches a kernel of a library like a function of a module.
    function = driver.CUfunction(int(kernel.handle))
    return _Loaded(driver.cuLaunchKernel, function, (module, kernel))
