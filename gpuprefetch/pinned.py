"""Where does pinned memory come from, and which thread makes it so?

torch's own pinned allocator rounds up to a power of two and keeps what it has until the
process ends. On CUDA this registers an anonymous mapping of the exact size instead;
elsewhere, and where that is refused, it takes what torch offers.

Registering is a call to the device, left to the thread that issues copies: from another
one it would spoil a graph capture that the loop has under way.
"""

import logging
import mmap
from contextlib import suppress
from typing import Protocol, cast

import torch

__all__ = ["PinnedBuffer"]

_logger = logging.getLogger(__name__)


class PinnedBuffer:
    """Host memory of exactly the size asked for, page-locked before its first copy.

    Args:
        num_bytes: Size, more than 0.
        device: Accelerator that will read the buffer.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.num_bytes = num_bytes
        self._device = device
        # None where there is nothing to register, or no more.
        self._runtime = _registering_runtime(device)
        self._is_registered = False
        if self._runtime is None:
            self.bytes = torch.empty(
                num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True
            )
        else:
            # The mapping is this tensor's from here on, and goes with it.
            self.bytes = torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)

    def pin(self) -> None:
        """Lock the pages, at the first call; for the thread that issues copies."""
        if self._is_registered or self._runtime is None:
            return
        address = self.bytes.data_ptr()
        if int(self._runtime.cudaHostRegister(address, self.num_bytes, 0)) == 0:
            self._is_registered = True
            return
        self._runtime = None
        _clear_last_error(self._device)
        _logger.warning(
            "cannot page-lock %d bytes of host memory; copies from them will block the "
            "loop. Raise the limit (ulimit -l) or use smaller batches. "
            "logging.getLogger('gpuprefetch').setLevel(logging.ERROR) silences this.",
            self.num_bytes,
        )

    def unpin(self) -> None:
        """Unlock the pages. No copy may be reading them any more; safe to call twice.

        For the thread that issues copies, too, as long as there is one; at the end of
        the buffer's life, for whichever thread drops it.
        """
        runtime, self._runtime = self._runtime, None
        if runtime is not None and self._is_registered:
            runtime.cudaHostUnregister(self.bytes.data_ptr())

    def __del__(self) -> None:
        self.unpin()


def _clear_last_error(device: torch.device) -> None:
    """Take back the refusal that the runtime keeps for the next kernel launch."""
    with suppress(RuntimeError):
        torch.zeros(1, device=device)


class _Runtime(Protocol):
    """The two calls of ``torch.cuda.cudart()`` that are used here."""

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        """Lock pages; 0 on success."""

    def cudaHostUnregister(self, address: int) -> int:
        """Unlock them; 0 on success."""


def _registering_runtime(device: torch.device) -> _Runtime | None:
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return cast(_Runtime, torch.cuda.cudart())  # type: ignore[no-untyped-call]
