"""How does ``kernel.cu`` get onto the device?

The only file that imports ``cuda``. A variant is compiled by NVRTC the first time it is
needed (about a second) and kept twice: in the process, and as a cubin in the user's
cache folder, named by a digest of source, architecture and compiler.
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

from gpuprefetch.augment.variant import Pixel

__all__ = [
    "PIXELS",
    "Loaded",
    "compile_cubin",
    "kernel_source",
    "load_kernel",
    "why_not",
]

_logger = logging.getLogger(__name__)

PIXELS: dict[torch.dtype, Pixel] = {
    torch.uint8: "u8",
    torch.uint16: "u16",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float32: "f32",
}
"""What the kernel calls each dtype that it reads; it writes the floating ones."""


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
def kernel_source() -> str:
    """The text of ``kernel.cu``, with ``values.cu`` where it is included."""
    folder = resources.files(__package__)
    source = folder.joinpath("kernel.cu").read_text()
    values = folder.joinpath("values.cu").read_text()
    return source.replace('#include "values.cu"\n', values)


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
    source = header + kernel_source()
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
        _logger.info("compiled kernels are not kept on disk: %s", error)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A kernel in the memory of one device."""

    launch: Callable[..., tuple[Any, ...]]
    """The driver's ``cuLaunchKernel``."""
    function: Any
    module: Any
    """Keeps the code loaded."""


@functools.cache
def load_kernel(header: str, device: torch.device, shared: int) -> Loaded:
    """Compile a variant and load it; ``shared`` is its dynamic shared memory in bytes.

    Raises:
        RuntimeError: The device has less shared memory.
    """
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
    return Loaded(driver.cuLaunchKernel, function, (module, kernel))
