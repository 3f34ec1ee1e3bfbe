"""Where in a block does the host wait for the device?

CUDA alone can tell: torch warns of each such call while its debug mode is on. The mode
is global, so it is on for the block only, and not touched if the user has set it.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

import torch

__all__ = ["syncs_noted"]

_MESSAGE = "called a synchronizing"
# Torch's own word on the mode, once in a process.
_ASIDE = "Synchronization debug mode is a prototype"


@contextmanager
def syncs_noted(device: torch.device) -> Iterator[list[str]]:
    """Note the places at which a block waits for the device.

    Args:
        device: Where the block works.

    Yields:
        ``file:line`` of each wait, filled as the block runs; stays empty where no
        device can tell.
    """
    places: list[str] = []
    if device.type != "cuda" or torch.cuda.get_sync_debug_mode() != 0:
        yield places
        return
    with _warnings_taken(places):
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode("default")


@contextmanager
def _warnings_taken(places: list[str]) -> Iterator[None]:
    """Take torch's warnings of waits for ourselves; all others go their usual way."""
    with warnings.catch_warnings():
        show_others = warnings.showwarning

        def show(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> Any:
            if _MESSAGE in str(message):
                places.append(f"{filename}:{lineno}")
            elif _ASIDE not in str(message):
                show_others(message, category, filename, lineno, file, line)

        for text in (_MESSAGE, _ASIDE):
            warnings.filterwarnings("always", message=f".*{text}")
        warnings.showwarning = show
        yield
