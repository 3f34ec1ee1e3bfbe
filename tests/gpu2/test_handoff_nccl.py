"""Is every batch intact while NCCL all-reduces run, and would a race be seen?"""

import json
from typing import Any

import pytest

from tests.torchrun import torchrun

_WAYS = ["pinned-inline", "pinned-thread", "pageable-inline", "pageable-thread"]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks counted."""
    out = tmp_path_factory.mktemp("handoff")
    torchrun(
        "tests/gpu2/handoff_worker.py", "--out", str(out), num_ranks=2, limit_s=130
    )
    return [json.loads((out / f"handoff-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("way", _WAYS)
def test_batches_and_sums_are_intact(seen: list[dict[str, Any]], way: str) -> None:
    for rank in seen:
        assert rank[way] == {"wrong_batches": 0, "wrong_sums": 0, "all_reduces": 400}


@pytest.mark.parametrize("half", ["enqueue_wait", "record_use"])
@pytest.mark.parametrize("way", _WAYS)
def test_meta_a_missing_half_of_the_hand_off_is_seen(
    seen: list[dict[str, Any]], way: str, half: str
) -> None:
    for rank in seen:
        assert rank[f"{way} without {half}"]["wrong_batches"] > 0
