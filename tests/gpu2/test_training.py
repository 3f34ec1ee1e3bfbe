"""Do two ranks share the data and train as one does, whatever happens in between?"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ranks_checks import CHECKS, load_seen
from tests.torchrun import torchrun
from tests.train_ddp import Trained, stop, train

_NUM_RANKS = 2
# Two ranks average the gradients of two halves of a batch, so they train on the same
# samples as one, in the same order of steps; the augmentation differs.
_MOST_DIFFERENCE = 0.04


@pytest.fixture(scope="module")
def seen(
    ranks_device: str, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """What each rank saw; before, one rank left a state that two must refuse."""
    out = tmp_path_factory.mktemp("ranks")
    for num_ranks in (1, _NUM_RANKS):
        arguments = ("--out", str(out), "--device", ranks_device)
        torchrun("tests/ranks_worker.py", *arguments, num_ranks=num_ranks, limit_s=70)
    return load_seen(out, _NUM_RANKS)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__[6:])
def test_ranks(
    ranks_device: str,
    seen: list[dict[str, Any]],
    check: Callable[[list[dict[str, Any]]], None],
) -> None:
    assert {rank["world_size"] for rank in seen} == {_NUM_RANKS}
    check(seen)


@pytest.fixture(scope="module")
def whole(ranks_device: str) -> Trained:
    """A run of the example on two ranks."""
    return train("--device", ranks_device, num_ranks=_NUM_RANKS)


def test_training_runs_on_both_ranks(ranks_device: str, whole: Trained) -> None:
    assert whole.num_ranks == _NUM_RANKS
    assert whole.device == ("cpu" if ranks_device == "cpu" else "cuda:0")


def test_the_same_seed_twice_gives_the_same_weights(
    ranks_device: str, whole: Trained
) -> None:
    assert train("--device", ranks_device, num_ranks=_NUM_RANKS) == whole


def test_a_stopped_run_goes_on_to_the_same_weights(
    ranks_device: str, whole: Trained, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint.pt"
    stop(checkpoint, "--device", ranks_device, after=47, num_ranks=_NUM_RANKS)
    arguments = ("--device", ranks_device, "--checkpoint", str(checkpoint))
    assert train(*arguments, num_ranks=_NUM_RANKS) == whole


def test_two_ranks_learn_as_much_as_one(ranks_device: str, whole: Trained) -> None:
    alone = train("--device", ranks_device, num_ranks=1)
    assert alone.num_ranks == 1
    assert alone.weights != whole.weights
    assert abs(alone.rotated - whole.rotated) <= _MOST_DIFFERENCE
    assert abs(alone.upright - whole.upright) <= _MOST_DIFFERENCE
