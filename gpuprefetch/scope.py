"""Under which of torch's modes do copies and transforms run?

Not under those of the loop: a transform must give the same pixels whether the loop
trains, evaluates or runs under autocast, and what is yielded must be usable in all of
them. So: no graph is recorded, no inference tensors are made, autocast is off. The
user's default device stays, since factory calls in a transform expect it.
"""

from contextlib import AbstractContextManager

import torch

__all__ = ["transform_modes"]


class transform_modes:
    """Run a block without gradients, inference mode and autocast.

    Made once and used for every batch, one block at a time. A mode is only touched if
    it is not as it should be: entering one costs more than asking for it.

    Args:
        device: Where the block's operations run.
    """

    __slots__ = ("_autocast_types", "_entered", "_had_grad")

    def __init__(self, device: torch.device) -> None:
        self._autocast_types = tuple(filter(_has_autocast, (device.type, "cpu")))
        self._entered: list[AbstractContextManager[object]] = []

    def __enter__(self) -> None:
        if torch.is_inference_mode_enabled():
            self._enter(torch.inference_mode(False))
        self._had_grad = torch.is_grad_enabled()
        if self._had_grad:
            torch.set_grad_enabled(False)
        for device_type in self._autocast_types:
            if torch.is_autocast_enabled(device_type):
                self._enter(torch.autocast(device_type, enabled=False))

    def _enter(self, mode: AbstractContextManager[object]) -> None:
        mode.__enter__()
        self._entered.append(mode)

    def __exit__(self, *exception: object) -> None:
        if self._had_grad:
            torch.set_grad_enabled(True)
        while self._entered:
            self._entered.pop().__exit__(None, None, None)


def _has_autocast(device_type: str) -> bool:
    """Tell whether a type has autocast; "meta", for one, has none."""
    try:
        torch.is_autocast_enabled(device_type)
    except RuntimeError:
        return False
    return True
