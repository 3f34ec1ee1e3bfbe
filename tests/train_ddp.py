"""How is ``examples/train_ddp.py`` run, and what did it learn?"""

import re
from dataclasses import dataclass
from pathlib import Path

from tests.torchrun import torchrun

__all__ = ["Trained", "stop", "train"]

_EXAMPLE = "examples/train_ddp.py"


@dataclass(frozen=True)
class Trained:
    """What a run of the example printed at its end."""

    num_ranks: int
    device: str
    weights: str
    """Digest of the weights."""
    upright: float
    """Share of upright test digits that are read right."""
    rotated: float


def train(*arguments: str, num_ranks: int, limit_s: float = 60) -> Trained:
    """Train to the end.

    Raises:
        AssertionError: The stated accuracy was missed, or the run failed.
    """
    said = torchrun(_EXAMPLE, *arguments, num_ranks=num_ranks, limit_s=limit_s)
    found = re.search(
        r"ranks: (\d+), device (\S+)\nweights: (\w+)\n"
        r"read right: ([\d.]+)% upright, ([\d.]+)% rotated",
        said,
    )
    assert found, f"no result in:\n{said[-4000:]}"
    upright, rotated = float(found[4]) / 100, float(found[5]) / 100
    return Trained(int(found[1]), found[2], found[3], upright, rotated)


def stop(
    checkpoint: Path,
    *arguments: str,
    after: int,
    num_ranks: int,
    limit_s: float = 60,
) -> None:
    """Train for some steps, then leave a checkpoint and end."""
    ends = ("--checkpoint", str(checkpoint), "--stop-after", str(after))
    said = torchrun(_EXAMPLE, *arguments, *ends, num_ranks=num_ranks, limit_s=limit_s)
    assert "read right" not in said, "it was not stopped"
    assert checkpoint.exists()
