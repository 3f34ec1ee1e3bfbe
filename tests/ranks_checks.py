"""Does what several ranks saw fit together? Judges what ``ranks_worker.py`` wrote."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from tests.ranks_worker import NUM_ITEMS, SAVED_AFTER

__all__ = ["CHECKS", "load_seen"]

Seen = list[dict[str, Any]]


def load_seen(out: Path, num_ranks: int) -> Seen:
    """Read what each rank wrote."""
    return [
        json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(num_ranks)
    ]


def check_ranks_are_disjoint_and_complete(seen: Seen) -> None:
    """Every item is read in every epoch, by one rank; a few twice, to fill up."""
    for epoch in (0, 1):
        shares = [rank["with_group"][epoch]["items"] for rank in seen]
        times = Counter(item for share in shares for item in share)
        assert set(times) == set(range(NUM_ITEMS)), "an item was never read"
        assert sum(times.values()) - NUM_ITEMS == -NUM_ITEMS % len(seen)
        assert len({len(share) for share in shares}) == 1


def check_set_epoch_reaches_the_sampler(seen: Seen) -> None:
    for rank in seen:
        orders = [epoch["items"] for epoch in rank["with_group"]]
        assert orders == rank["bare_items"]
        assert orders[0] != orders[1]


def _all_pixels(seen: Seen, run: str) -> list[str]:
    return [
        pixels for rank in seen for epoch in rank[run] for pixels in epoch["pixels"]
    ]


def check_no_two_batches_are_augmented_alike(seen: Seen) -> None:
    """Over ranks, epochs and batches, whether or not the loader has a seed."""
    for run in ("with_group", "unseeded"):
        pixels = _all_pixels(seen, run)
        assert len(set(pixels)) == len(pixels), f"two batches are alike: {run}"


def check_the_same_seed_gives_the_same_pixels(seen: Seen) -> None:
    for run in ("again", "workers", "before_group"):
        assert _all_pixels(seen, run) == _all_pixels(seen, "with_group"), run


def check_resume_is_exact(seen: Seen) -> None:
    for rank in seen:
        assert rank["resumed"] == rank["went_on"]
        expected = rank["with_group"][1]
        assert rank["went_on"]["pixels"] == expected["pixels"][SAVED_AFTER:]
        assert rank["went_on"]["pixels"], "nothing was left to compare"


def check_another_number_of_ranks_is_refused(seen: Seen) -> None:
    for rank in seen:
        for name, outcome in rank["foreign"].items():
            assert "refused" in outcome, f"{name} was accepted by {len(seen)} ranks"
            saved_by = name.split("-")[1]
            said = f"one of {saved_by} processes, and there are {len(seen)} now"
            assert said in outcome["refused"], outcome


def check_each_rank_stays_on_its_device(seen: Seen) -> None:
    for number, rank in enumerate(seen):
        index = rank["current_before"]
        expected = "cpu" if index is None else f"cuda:{number}"
        for epoch in rank["with_group"]:
            assert epoch["devices"] == [expected]
        assert rank["current_after"] == index
        assert index in (None, number)


CHECKS = (
    check_ranks_are_disjoint_and_complete,
    check_set_epoch_reaches_the_sampler,
    check_no_two_batches_are_augmented_alike,
    check_the_same_seed_gives_the_same_pixels,
    check_resume_is_exact,
    check_another_number_of_ranks_is_refused,
    check_each_rank_stays_on_its_device,
)
