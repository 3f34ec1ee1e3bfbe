"""Do several processes share the data, and none of the augmentation?

Two and four processes with gloo on the CPU, one launch of each; ``make gpu2`` judges
the same under NCCL on two GPUs.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpuprefetch.ranks import Ranks
from tests.ranks_checks import (
    CHECKS,
    check_another_number_of_ranks_is_refused,
    check_each_rank_stays_on_its_device,
    check_no_two_batches_are_augmented_alike,
    check_ranks_are_disjoint_and_complete,
    check_resume_is_exact,
    check_set_epoch_reaches_the_sampler,
    check_the_same_seed_gives_the_same_pixels,
    load_seen,
)
from tests.torchrun import torchrun
from tests.train_ddp import stop, train

Seen = list[dict[str, Any]]

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Seen]:
    """What two ranks saw, and then four, which also try the states of the two."""
    out = tmp_path_factory.mktemp("ranks")
    seen = {}
    for num_ranks in (2, 4):
        torchrun(
            "tests/ranks_worker.py", "--out", str(out), num_ranks=num_ranks, limit_s=100
        )
        seen[num_ranks] = load_seen(out, num_ranks)
    return seen


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__[6:])
def test_ranks(
    runs: dict[int, Seen], num_ranks: int, check: Callable[[Seen], None]
) -> None:
    assert {rank["world_size"] for rank in runs[num_ranks]} == {num_ranks}
    check(runs[num_ranks])


def test_a_state_of_other_ranks_was_tried(runs: dict[int, Seen]) -> None:
    """Only the first two of four ranks find one, saved by a rank of that number."""
    tried = [list(rank["foreign"]) for rank in runs[4]]
    assert tried == [["state-2-0.pt"], ["state-2-1.pt"], [], []]


# What torchrun says before a process group exists #


def test_rank_is_read_from_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert Ranks.current() == Ranks(2, 3)


@pytest.mark.parametrize(
    "environment", [{}, {"RANK": "1"}, {"RANK": "", "WORLD_SIZE": "2"}]
)
def test_without_torchrun_a_process_is_alone(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert Ranks.current() == Ranks(0, 1)


# The checks can fail #


def _overlap(seen: Seen) -> None:
    seen[1]["with_group"] = seen[0]["with_group"]


def _ignore_epochs(seen: Seen) -> None:
    for rank in seen:
        rank["with_group"][1]["items"] = rank["with_group"][0]["items"]


def _augment_alike(seen: Seen) -> None:
    seen[1]["unseeded"][0]["pixels"] = seen[0]["unseeded"][0]["pixels"]


def _depend_on_workers(seen: Seen) -> None:
    seen[0]["workers"][1]["pixels"].reverse()


def _skip_a_batch(seen: Seen) -> None:
    seen[1]["resumed"]["pixels"].pop(0)


def _accept_any_state(seen: Seen) -> None:
    seen[0]["foreign"]["state-3-0.pt"] = seen[0]["resumed"]


def _use_the_first_gpu(seen: Seen) -> None:
    for number, rank in enumerate(seen):
        rank["current_before"] = rank["current_after"] = number
        rank["with_group"][0]["devices"] = ["cuda:0"]


@pytest.mark.parametrize(
    ("plant", "check"),
    [
        (_overlap, check_ranks_are_disjoint_and_complete),
        (_ignore_epochs, check_set_epoch_reaches_the_sampler),
        (_augment_alike, check_no_two_batches_are_augmented_alike),
        (_depend_on_workers, check_the_same_seed_gives_the_same_pixels),
        (_skip_a_batch, check_resume_is_exact),
        (_accept_any_state, check_another_number_of_ranks_is_refused),
        (_use_the_first_gpu, check_each_rank_stays_on_its_device),
    ],
)
def test_meta_a_planted_fault_is_seen(
    runs: dict[int, Seen],
    plant: Callable[[Seen], None],
    check: Callable[[Seen], None],
) -> None:
    seen = copy.deepcopy(runs[2])
    plant(seen)
    with pytest.raises(AssertionError):
        check(seen)


# Training #


def test_a_stopped_training_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    """In the middle of the third epoch, in processes of their own."""
    checkpoint = tmp_path / "checkpoint.pt"
    whole = train("--device", "cpu", num_ranks=2)
    stop(checkpoint, "--device", "cpu", after=47, num_ranks=2)
    resumed = train("--device", "cpu", "--checkpoint", str(checkpoint), num_ranks=2)
    assert (whole.num_ranks, whole.device) == (2, "cpu")
    assert resumed == whole
