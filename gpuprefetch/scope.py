"""Under which of torch's modes do copies and transforms run?

Not under those of the loop: a transform must give the same pixels whether the loop
trains, evaluates or runs under autocast, and what is yielded must be usable in all of
them. So: no graph is recorded, no inference tensors are made, autocast is off. The
user's default device stays, since factory calls in a transform expect it.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

__all__ = ["transform_modes"]


@contextmanager
def transform_modes(device: torch.device) -> Iterator[None]:
    """Run a block without gradients, inference mode and autocast."""
    with torch.inference_mode(False), torch.no_grad(), ExitStack() as stack:
        for kind in {device.type, "cpu"}:
            # Asked first: the context costs more than all else here.
            if _is_autocast_on(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _is_autocast_on(device_type: str) -> bool:
    try:
        return torch.is_autocast_enabled(device_type)
    except RuntimeError:
        # Device types without autocast, such as "meta".
        return False
