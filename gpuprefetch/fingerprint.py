"""Is this the source over which a state was saved?

A position in one order of samples means nothing in another. What can be compared
without reading a sample is: the kind of source, its counts, its sampler, and which of
how many processes this is. A mark that either side does not know is not compared.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from gpuprefetch.errors import StateError
from gpuprefetch.ranks import Ranks

__all__ = ["describe_source", "refuse_another_source"]


def describe_source(source: Any) -> dict[str, Any]:
    """Give the marks of a source, as values that JSON takes; reads no sample."""
    ranks = Ranks.current()
    marks: dict[str, Any] = {
        "kind": "iterable",
        "batches": None,
        "samples": None,
        "batch_size": None,
        "sampler": None,
        "shard": None,
        "world_size": ranks.world_size,
        "rank": ranks.rank,
    }
    if not isinstance(source, DataLoader):
        marks["batches"] = _length(source)
    elif isinstance(source.dataset, IterableDataset):
        # Its length is not asked for: the DataLoader would take it for a promise.
        marks["kind"] = "DataLoader of an IterableDataset"
        marks["batch_size"] = source.batch_size
    else:
        marks |= _describe_map_style(source)
    return marks


def _describe_map_style(source: DataLoader[Any]) -> dict[str, Any]:
    sampler = source.sampler
    ours = [source.sampler, source.batch_sampler]
    is_torchs = all(part is None or _is_torchs(part) for part in ours)
    shard = [getattr(sampler, "rank", None), getattr(sampler, "num_replicas", None)]
    return {
        "kind": "DataLoader",
        # A sampler of the user's may give another number of batches in each epoch.
        "batches": _length(source) if is_torchs else None,
        "samples": _length(source.dataset),
        "batch_size": source.batch_size,
        "sampler": type(sampler).__name__,
        "shard": shard if all(isinstance(number, int) for number in shard) else None,
    }


def _is_torchs(sampler: object) -> bool:
    return type(sampler).__module__.partition(".")[0] in ("torch", "torchdata")


def _length(sized: Any) -> int | None:
    try:
        return len(sized)
    except Exception:
        # Whatever a user's __len__ raises: it is not known.
        return None


def refuse_another_source(
    saved: Mapping[str, Any], current: Mapping[str, Any], *, any_rank: bool
) -> None:
    """Compare the marks of two sources.

    Args:
        saved: From the state; without entries, if that is older than the marks.
        current: Of the source at hand.
        any_rank: The state is good for all ranks of the same run.

    Raises:
        StateError: They differ, by the first difference that matters.
    """
    for mark, say in _REASONS.items():
        before, now = saved.get(mark), current.get(mark)
        if before is None or now is None or before == now:
            continue
        if any_rank and (mark == "rank" or (mark == "shard" and before[1] == now[1])):
            continue
        raise StateError(say(before, now))


def _another(what: str) -> Callable[[Any, Any], str]:
    return lambda before, now: (
        f"the state was saved over a source with {what} {before}, and this one has "
        f"{now}. A place in the one means nothing in the other: build the same source, "
        "or start the epoch anew."
    )


def _say_kind(before: Any, now: Any) -> str:
    return (
        f"the state was saved over a source of the kind {before!r}, and this one is of "
        f"the kind {now!r}. Use the same kind."
    )


def _say_world_size(before: Any, now: Any) -> str:
    return (
        f"the state was saved by one of {before} processes, and there are {now} now: "
        "each would read other samples. Resume with as many, or start the epoch anew."
    )


def _say_rank(before: Any, now: Any) -> str:
    return (
        f"the state was saved by rank {before}, and this is rank {now}, which reads "
        "other samples and draws other pixels. Save and load one state per rank; one "
        "serves all ranks only with seed=n and a sampler such as DistributedSampler."
    )


def _say_shard(before: Any, now: Any) -> str:
    return (
        f"the state was saved with the sampler's part {before[0]} of {before[1]}, and "
        f"this sampler reads part {now[0]} of {now[1]}. Build it with the same rank "
        "and num_replicas."
    )


# In the order in which they are compared: the reason that explains most comes first.
_REASONS: dict[str, Callable[[Any, Any], str]] = {
    "kind": _say_kind,
    "world_size": _say_world_size,
    "rank": _say_rank,
    "shard": _say_shard,
    "samples": _another("a data set of length"),
    "batch_size": _another("batch_size"),
    "batches": _another("this number of batches:"),
    "sampler": _another("a sampler of the class"),
}
