"""What holds the loop back, and which one setting changes that?

:func:`diagnose` reads the figures of a pass and names one verdict. Where it draws its
lines, and why there, is in ``thresholds``.

[Note: How the verdict is found]
1. What the loop loses to its input is ``stall_ms``, the time in which the device stood
   still for a batch; where there is no such device, the time in ``next``. Is it less
   than 5 % of a step, nothing is to gain: *step-bound*, or *host-bound* where the
   device is found to have run dry all the same.
2. Where nothing runs beside the loop (on a CPU), the step has a part of the time, too.
   Is that larger than each cause, the loop is *step-bound* as well, and the advice says
   what the largest cause leaves to gain.
3. Else the largest of its possible causes counts. Those on the loop's thread are timed
   as they are. What the device lost beyond them is the side stream's, and is shared out
   between copy and transform as their device times are.
"""

from dataclasses import dataclass
from typing import Literal

from gpuprefetch.cores import FEW_WORKERS, count_cores, workers_for
from gpuprefetch.stats import LoaderStats
from gpuprefetch.thresholds import (
    FEWEST_BATCHES,
    HEAVY_SOURCE_MS,
    NOTHING_TO_GAIN,
    RUN_DRY,
)

__all__ = ["Diagnosis", "Verdict", "diagnose"]

Verdict = Literal[
    "source-bound",
    "copy-bound (pageable)",
    "copy-bound (bus)",
    "transform-bound (host)",
    "transform-bound (device)",
    "step-bound",
    "host-bound",
    "undecided",
]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One verdict on one pass."""

    verdict: Verdict
    """What holds the loop back; ``undecided`` after too few batches."""
    figure: str
    """The numbers that say so, in a sentence."""
    advice: str
    """The one setting to change next, or that there is none."""
    lost_share: float
    """Share of a step that the loop loses to its input, in [0, 1]: the most that any
    loader could gain."""


def diagnose(stats: LoaderStats) -> Diagnosis:
    """Name what holds the loop back; see [Note: How the verdict is found]."""
    if stats.batches < FEWEST_BATCHES:
        return _undecided(f"Too few batches to tell: {stats.batches}.", FEWEST_BATCHES)
    period_ms = max(stats.period_ms.mean, 1e-6)
    lost_ms = min(_lost_ms(stats), period_ms)
    share = lost_ms / period_ms
    if share < NOTHING_TO_GAIN:
        return _without_a_loss(stats, share)
    causes = _causes(stats, lost_ms)
    verdict = max(causes, key=lambda name: causes[name])
    is_timed = stats.copy_ms.count or stats.transform_ms.count
    if verdict in _ON_DEVICE and not is_timed:
        # A pass so short that all was issued before its first batch was there.
        return _undecided(
            "Copy and transform were not timed on the device.", 4 * stats.depth
        )
    step_ms = period_ms - lost_ms
    if not stats.is_overlapped and causes[verdict] < step_ms:
        return _step_beside(stats, step_ms, share, verdict, causes[verdict])
    figure, advice = _EXPLAIN[verdict](stats)
    return Diagnosis(verdict, figure, advice, share)


def _undecided(why: str, fewest: int) -> Diagnosis:
    advice = f"Look again after at least {max(fewest, FEWEST_BATCHES)} batches."
    return Diagnosis("undecided", why, advice, 0.0)


def _lost_ms(stats: LoaderStats) -> float:
    if stats.stall_ms.count:
        return stats.stall_ms.mean
    return stats.source_wait_ms.mean + stats.loader_ms.mean


def _causes(stats: LoaderStats, lost_ms: float) -> dict[Verdict, float]:
    """Give what each cause takes of a step, in ms."""
    source_ms, transform_ms = stats.source_wait_ms.mean, stats.transform_host_ms.mean
    packing_ms = 0.0 if stats.is_threaded else stats.pin_ms.mean
    if stats.is_threaded and stats.pin_ms.mean > stats.pull_ms.mean:
        # The thread that the loop waits for is busy packing, not pulling.
        source_ms, packing_ms = 0.0, source_ms
    on_host_ms = source_ms + transform_ms + packing_ms + stats.own_ms
    late_ms = max(lost_ms - on_host_ms, 0.0)
    # Device times of both; never 0, so that they can be shared out.
    copy_ms, run_ms = stats.copy_ms.mean, stats.transform_ms.mean
    copy_part = copy_ms / (copy_ms + run_ms) if copy_ms else 0.0
    return {
        "source-bound": source_ms,
        "copy-bound (pageable)": packing_ms,
        "copy-bound (bus)": late_ms * copy_part,
        "transform-bound (host)": transform_ms,
        "transform-bound (device)": late_ms * (1.0 - copy_part),
        "host-bound": stats.own_ms,
    }


def _without_a_loss(stats: LoaderStats, share: float) -> Diagnosis:
    if stats.stall_ms.count and stats.dry_share >= RUN_DRY:
        figure, advice = _explain_host(stats)
        return Diagnosis("host-bound", figure, advice, share)
    what = "device stood still" if stats.stall_ms.count else "loop waited"
    return Diagnosis(
        "step-bound",
        f"The {what} for its batch {_part(_lost_ms(stats), stats)}.",
        "Nothing to gain here: the time is in the training step itself.",
        share,
    )


def _step_beside(
    stats: LoaderStats, step_ms: float, share: float, cause: Verdict, cause_ms: float
) -> Diagnosis:
    """Tell of a step that takes longer than each cause of a loss, in turn with it."""
    gain = cause_ms / max(stats.period_ms.mean, 1e-6)
    advice = f"At most {gain:.0%} to gain: {_CAUSES_IN_TURN[cause]}."
    if gain >= NOTHING_TO_GAIN:
        advice += f" {_EXPLAIN[cause](stats)[1]}"
    return Diagnosis(
        "step-bound",
        f"The training step takes {_part(step_ms, stats)}.",
        advice,
        share,
    )


# Words #


def _part(ms: float, stats: LoaderStats) -> str:
    """Write ``1.20 of 5.10 ms a batch (24 %)``."""
    period_ms = stats.period_ms.mean
    # While a pass runs, its newest batch has parts and no period yet.
    share = min(ms / max(period_ms, 1e-6), 1.0)
    return f"{min(ms, period_ms):.2f} of {period_ms:.2f} ms a batch ({share:.0%})"


def _explain_source(stats: LoaderStats) -> tuple[str, str]:
    figure = f"The loop waits for the source {_part(stats.source_wait_ms.mean, stats)}."
    # Where a thread pulls, the loop may wait for a small part of it only.
    source_ms = max(stats.source_wait_ms.mean, stats.pull_ms.mean)
    if stats.num_workers == 0 and source_ms < HEAVY_SOURCE_MS:
        return figure, (
            f"Larger batches, or a cheaper Dataset: it takes less than "
            f"{HEAVY_SOURCE_MS:.0f} ms a batch, too little for a worker process to "
            "help."
        )
    if stats.num_workers == 0:
        return figure, (
            f"DataLoader(num_workers={workers_for(FEW_WORKERS)}), now 0: batches are "
            "made beside it."
        )
    if stats.num_workers:
        return figure, _advise_busy_workers(stats.num_workers)
    if not stats.is_threaded:
        return figure, "background=True: a thread pulls the source beside the loop."
    return figure, "A faster source: the thread that pulls it is busy all the time."


def _advise_busy_workers(now: int) -> str:
    cheaper = "cheaper decoding, or augmentation in transform= and not in the workers."
    more = workers_for(2 * now)
    if more > now:
        return f"DataLoader(num_workers={more}), now {now}; then {cheaper}"
    return f"num_workers={now} is enough, with {count_cores()} CPU cores: {cheaper}"


def _explain_packing(stats: LoaderStats) -> tuple[str, str]:
    figure = (
        "Batches arrive in pageable memory, and packing one into pinned memory takes "
        f"{_part(stats.pin_ms.mean, stats)}."
    )
    if not stats.is_threaded:
        return figure, "background=True: a thread packs beside the loop."
    return figure, (
        "DataLoader(pin_memory=True), or smaller batches to pack: uint8 images, "
        "converted in transform=."
    )


def _explain_bus(stats: LoaderStats) -> tuple[str, str]:
    rate = stats.copy_gb_per_s.p50
    return (
        f"The copy to the device takes {_part(stats.copy_ms.mean, stats)}, at "
        f"{rate:.1f} GB/s, and the device stood still {stats.stall_ms.mean:.2f} ms."
    ), "Send less: uint8 images instead of floats, converted in transform=."


def _explain_transform_host(stats: LoaderStats) -> tuple[str, str]:
    taken = _part(stats.transform_host_ms.mean, stats)
    if not stats.is_overlapped:
        return (
            f"The transform takes {taken}; on {stats.device} nothing runs beside it."
        ), "Fewer or cheaper operations; on a GPU it would run beside the step."
    figure = f"Issuing the transform takes the loop's thread {taken}."
    if stats.is_fused is None:
        return figure, (
            "Fewer, larger operations: a Kornia chain as transform= runs as one "
            "kernel; gpuprefetch.augment.GraphedTransform(fn) replays any other."
        )
    if stats.fusion.startswith("not fused: "):  # It was not taken over at all.
        return figure, f"The transform is {stats.fusion}."
    advice = f"The chain is {stats.fusion}. Leave out what is not fused"
    if not stats.is_graphed:
        advice += ", or pass gpuprefetch.augment.fuse(chain, kept='graphed')"
    return figure, f"{advice}."


def _explain_transform_device(stats: LoaderStats) -> tuple[str, str]:
    figure = (
        f"The transform takes the device {_part(stats.transform_ms.mean, stats)}, and "
        f"the loop's stream stood still {stats.stall_ms.mean:.2f} ms."
    )
    if stats.is_fused:
        return figure, (
            "gpuprefetch.augment.fuse(chain, resampling='single'): one resampling "
            "instead of several."
        )
    return figure, "Smaller images or fewer operations in transform=."


def _explain_host(stats: LoaderStats) -> tuple[str, str]:
    if stats.loader_ms.mean >= NOTHING_TO_GAIN * stats.period_ms.mean:
        return (
            f"Handling a batch takes the loop's thread "
            f"{_part(stats.loader_ms.mean, stats)}."
        ), "Larger batches, or fewer tensors in each: stack them in collate_fn=."
    return (
        f"At {stats.dry_share:.0%} of the calls of next() the device had nothing left "
        f"to do, though the loader took only {_part(stats.loader_ms.mean, stats)}."
    ), (
        "Nothing in the loader. Take .item(), .cpu() and print(loss) out of the step, "
        "or torch.compile(model, mode='reduce-overhead') if it has many launches."
    )


_EXPLAIN = {
    "source-bound": _explain_source,
    "copy-bound (pageable)": _explain_packing,
    "copy-bound (bus)": _explain_bus,
    "transform-bound (host)": _explain_transform_host,
    "transform-bound (device)": _explain_transform_device,
    "host-bound": _explain_host,
}

# Shared out by times that are of a sample of the batches.
_ON_DEVICE = ("copy-bound (bus)", "transform-bound (device)")

# What takes turns with the step on a CPU, where nothing is packed or sent.
_CAUSES_IN_TURN: dict[Verdict, str] = {
    "source-bound": "the source",
    "transform-bound (host)": "the transform",
    "host-bound": "the handling of a batch",
}
