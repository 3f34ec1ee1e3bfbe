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

    Made once and used for every batch. A mode is only touched if it is not as it should
    be: entering one costs more than asking for it. Blocks may nest, in one thread. An
    error or an interrupt while a block begins undoes what it has entered by then.

    Args:
        device: Where the block's operations run.
    """

    __slots__ = ("_autocast_types", "_to_exit")

    def __init__(self, device: torch.device) -> None:
        self._autocast_types = tuple(filter(_has_autocast, (device.type, "cpu")))
        # Of each block that is open, what it has changed; the newest last.
        self._to_exit: list[list[AbstractContextManager[object]]] = []

    def __enter__(self) -> None:
        entered: list[AbstractContextManager[object]] = []
        self._to_exit.append(entered)
        try:
            if torch.is_inference_mode_enabled():
                _enter(torch.inference_mode(False), entered)
            if torch.is_grad_enabled():
                entered.append(_gradients)
                torch._C._set_grad_enabled(False)
            for device_type in self._autocast_types:
                if torch.is_autocast_enabled(device_type):
                    _enter(torch.autocast(device_type, enabled=False), entered)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *exception: object) -> None:
        entered = self._to_exit.pop()
        while entered:
            entered.pop().__exit__(None, None, None)


class _Gradients:
    """Turns gradients on again: what is left of ``torch.no_grad`` without its cost.

    Of torch's functions it calls what they call in the end.
    """

    def __enter__(self) -> None:
        """Nothing is touched before the end."""

    def __exit__(self, *exception: object) -> None:
        torch._C._set_grad_enabled(True)


_gradients = _Gradients()


def _enter(
    mode: AbstractContextManager[object],
    entered: list[AbstractContextManager[object]],
) -> None:
    mode.__enter__()
    entered.append(mode)


def _has_autocast(device_type: str) -> bool:
    """Tell whether a type has autocast; "meta", for one, has none."""
    try:
        torch.is_autocast_enabled(device_type)
    except RuntimeError:
        return False
    return True
