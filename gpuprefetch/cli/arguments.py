"""How is a word from the command line turned into a value, or refused in one line?"""

import argparse
from collections.abc import Callable

import torch

__all__ = ["at_least", "available_device"]


def at_least(smallest: int) -> Callable[[str], int]:
    """Build an argparse ``type`` for whole numbers not below ``smallest``."""

    def parse(word: str) -> int:
        try:
            value = int(word)
        except ValueError:
            value = None
        if value is None or value < smallest:
            raise argparse.ArgumentTypeError(
                f"must be a whole number of at least {smallest}, got {word!r}"
            )
        return value

    return parse


def available_device(word: str) -> torch.device:
    """Parse a device on which a number can be computed right now."""
    try:
        device = torch.device(word)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise argparse.ArgumentTypeError(
            f"cannot train on {word!r}: {reason}"
        ) from error
    return device
