"""How busy does the driver say the GPU was, between two moments?

``utilization.gpu`` of ``nvidia-smi``: the share of time in which at least one kernel
was running, as NVML gives it. It says nothing of how much of the GPU that kernel used.
It is read every tenth of a second in a thread, from the driver's own library.
"""

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from benchmarks.suite import Place

__all__ = ["UtilizationSampler", "open_device", "watch_utilization"]

_PERIOD_S = 0.1


class UtilizationSampler:
    """Reads a number again and again, in a thread, until it is closed.

    Args:
        read: Gives the number.
        period_s: Between two readings.
    """

    def __init__(self, read: Callable[[], float], *, period_s: float = _PERIOD_S):
        self._read = read
        self._period_s = period_s
        # Appended to by the thread, read by the loop; a list's own lock suffices.
        self._readings: list[tuple[float, float]] = []
        self._is_over = threading.Event()  # Set by close(); ends the thread's wait.
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._is_over.wait(self._period_s):
            self._readings.append((time.perf_counter(), self._read()))

    def between(self, started: float, ended: float) -> float | None:
        """Mean of the readings between two times; ``None`` if there was none."""
        values = [value for when, value in self._readings if started <= when <= ended]
        return sum(values) / len(values) if values else None

    def close(self) -> None:
        """End the thread."""
        self._is_over.set()
        self._thread.join()


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


def open_device(device: torch.device) -> Callable[[], float]:
    """Give a function that reads the utilization of a CUDA device, in percent.

    Raises:
        OSError: The driver's library is missing, or refuses.
    """
    library = ctypes.CDLL("libnvidia-ml.so.1")
    handle = ctypes.c_void_p()

    def call(name: str, *arguments: object) -> None:
        status = getattr(library, name)(*arguments)
        if status != 0:
            raise OSError(f"{name} gave {status}")

    # By its UUID: the driver counts devices that CUDA_VISIBLE_DEVICES hides.
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
    call("nvmlInit_v2")
    call("nvmlDeviceGetHandleByUUID", ctypes.c_char_p(uuid), ctypes.byref(handle))

    def read() -> float:
        found = _Utilization()
        call("nvmlDeviceGetUtilizationRates", handle, ctypes.byref(found))
        return float(found.gpu)

    read()
    return read


@contextmanager
def watch_utilization(place: Place) -> Iterator[UtilizationSampler | None]:
    """Sample while a suite runs; ``None`` where there is nothing to be read."""
    try:
        read = open_device(place.device) if place.device.type == "cuda" else None
    except (OSError, AttributeError) as error:
        print(f"GPU utilization is not measured: {error}")
        read = None
    if read is None:
        yield None
        return
    sampler = UtilizationSampler(read)
    try:
        yield sampler
    finally:
        sampler.close()
