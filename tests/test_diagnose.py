"""Does the verdict follow from the figures, and does the report say it in plain words?

The figures here are made up, each set as one kind of loop shows it. Real loops that
provoke each verdict are in ``examples/diagnosis``, and ``test_examples_diagnosis`` runs
them.
"""

import os
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from gpuprefetch import LoaderStats, StreamPrefetchLoader
from gpuprefetch.cores import workers_for
from gpuprefetch.diagnose import diagnose
from gpuprefetch.findings import in_figures
from gpuprefetch.histogram import Spread
from gpuprefetch.report import report_on
from gpuprefetch.thresholds import FEWEST_BATCHES, NOTHING_TO_GAIN, RUN_DRY
from tests.sources import count


def figures(**given: Any) -> LoaderStats:
    """Build a record: plain numbers stand for figures that hardly vary."""
    spreads = {
        name: Spread(value, value, value, 40)
        for name, value in given.items()
        if isinstance(value, float) and name != "dry_share"
    }
    usual = {"device": "cuda:0", "depth": 2, "is_overlapped": True}
    return LoaderStats(batches=100, **{**usual, **given, **spreads})


# One loop of each kind, in ms a batch, as a GPU shows it.
STEP = figures(period_ms=10.0, between_ms=2.0, device_wait_ms=7.9, loader_ms=0.1,
               source_wait_ms=0.01, stall_ms=0.02, copy_ms=0.12)  # fmt: skip
SOURCE = figures(period_ms=30.0, between_ms=5.0, device_wait_ms=0.0, loader_ms=0.1,
                 source_wait_ms=24.9, stall_ms=20.0, copy_ms=0.12, pull_ms=30.0,
                 num_workers=2, is_threaded=True, dry_share=1.0)  # fmt: skip
PAGEABLE = figures(period_ms=20.0, between_ms=5.0, device_wait_ms=0.0, loader_ms=14.9,
                   source_wait_ms=0.1, pin_ms=14.0, pull_ms=0.1, stall_ms=10.0,
                   copy_ms=1.0, dry_share=1.0)  # fmt: skip
BUS = figures(period_ms=20.0, between_ms=2.0, device_wait_ms=17.8, loader_ms=0.1,
              source_wait_ms=0.1, stall_ms=15.0, copy_ms=18.0, transform_ms=0.5,
              copy_gb_per_s=50.0)  # fmt: skip
LAUNCHES = figures(period_ms=10.0, between_ms=2.0, device_wait_ms=0.0, loader_ms=7.9,
                   source_wait_ms=0.01, transform_host_ms=7.8, transform_ms=7.8,
                   copy_ms=0.1, stall_ms=5.0)  # fmt: skip
KERNELS = figures(period_ms=20.0, between_ms=2.0, device_wait_ms=17.0, loader_ms=0.2,
                  source_wait_ms=0.01, transform_host_ms=0.1, transform_ms=18.0,
                  copy_ms=0.1, stall_ms=10.0)  # fmt: skip
READS = figures(period_ms=10.0, between_ms=9.8, device_wait_ms=0.0, loader_ms=0.15,
                source_wait_ms=0.01, stall_ms=0.2, dry_share=1.0)  # fmt: skip

KINDS = {
    "step-bound": STEP,
    "source-bound": SOURCE,
    "copy-bound (pageable)": PAGEABLE,
    "copy-bound (bus)": BUS,
    "transform-bound (host)": LAUNCHES,
    "transform-bound (device)": KERNELS,
    "host-bound": READS,
}


@pytest.mark.parametrize(("verdict", "stats"), KINDS.items())
def test_each_kind_of_loop_gets_its_verdict(verdict: str, stats: LoaderStats) -> None:
    diagnosis = diagnose(stats)
    assert diagnosis.verdict == verdict
    assert re.search(r"\d", diagnosis.figure), "a verdict without a number"
    assert diagnosis.advice.endswith(".")
    assert 0 <= diagnosis.lost_share <= 1
    is_free = verdict in ("step-bound", "host-bound")
    assert (diagnosis.lost_share < NOTHING_TO_GAIN) is is_free


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let this process seem to have so many CPU cores."""

    def seem(number: int) -> None:
        monkeypatch.setattr(
            os, "sched_getaffinity", lambda process: set(range(number)), raising=False
        )

    return seem


@pytest.mark.parametrize(
    ("stats", "setting"),
    [
        (SOURCE, "num_workers=4"),
        (replace(SOURCE, num_workers=0), "num_workers=4"),
        (replace(SOURCE, num_workers=None, is_threaded=False), "background=True"),
        (replace(SOURCE, num_workers=None), "A faster source"),
        (PAGEABLE, "background=True"),
        (BUS, "uint8"),
        (LAUNCHES, "GraphedTransform"),
        (replace(LAUNCHES, fusion="not fused, Kornia: x"), "what is not fused"),
        (KERNELS, "Smaller images"),
        (replace(KERNELS, fusion="fused"), "resampling='single'"),
        (STEP, "Nothing to gain"),
        (READS, ".item()"),
    ],
)
def test_the_advice_fits_the_settings(
    stats: LoaderStats, setting: str, cores: Callable[[int], None]
) -> None:
    cores(16)
    assert setting in diagnose(stats).advice


def test_graphs_are_advised_only_where_nobody_asked_for_them() -> None:
    stats = replace(LAUNCHES, fusion="not fused, Kornia: x")
    assert "kept='graphed'" in diagnose(stats).advice
    assert "kept='graphed'" not in diagnose(replace(stats, is_graphed=True)).advice


@pytest.mark.parametrize(
    ("workers", "num_cores", "advice"),
    [
        (0, 16, "num_workers=4"),
        (0, 2, "num_workers=2"),
        (0, 1, "num_workers=1"),
        (2, 3, "num_workers=3"),
        (2, 2, "num_workers=2 is enough, with 2 CPU cores: cheaper decoding"),
        (4, 2, "num_workers=4 is enough, with 2 CPU cores: cheaper decoding"),
    ],
)
def test_no_more_workers_are_advised_than_there_are_cores(
    workers: int, num_cores: int, advice: str, cores: Callable[[int], None]
) -> None:
    cores(num_cores)
    assert advice in diagnose(replace(SOURCE, num_workers=workers)).advice


def test_a_source_quicker_than_a_hand_over_asks_for_no_workers() -> None:
    quick = _inline(period_ms=1.0, source_wait_ms=0.46, pull_ms=0.46, num_workers=0)
    beside = replace(
        SOURCE,
        source_wait_ms=Spread(1.9, 1.9, 1.9, 40),
        pull_ms=Spread(1.9, 1.9, 1.9, 40),
        period_ms=Spread(3.0, 3.0, 3.0, 40),
        num_workers=0,
    )
    for stats in (quick, beside):
        advice = diagnose(stats).advice
        assert "Larger batches" in advice
        assert "less than 2 ms" in advice
        assert "num_workers=" not in advice
    assert diagnose(quick).advice.startswith("At most 46% to gain: the source. Larger")
    # Its thread takes long, though the loop waits for the rest of it only.
    pulled = replace(beside, pull_ms=Spread(9.0, 9.0, 9.0, 40))
    heavy = replace(quick, period_ms=SOURCE.period_ms, source_wait_ms=SOURCE.pull_ms)
    for stats in (pulled, heavy):
        assert "num_workers=" in diagnose(stats).advice


@pytest.mark.parametrize(
    ("num_cores", "advice"),
    [
        (16, "num_workers=4, or as many as there are cores to spare."),
        (4, "num_workers=4."),
        (2, "num_workers=2."),
    ],
)
def test_a_note_asks_for_no_more_workers_than_there_are_cores(
    num_cores: int, advice: str, cores: Callable[[int], None]
) -> None:
    cores(num_cores)
    (slow,) = in_figures(replace(SOURCE, num_workers=0), "x")
    assert slow.text.endswith(f"Pass {advice}")
    (packed,) = in_figures(PAGEABLE, "x")
    assert f"num_workers={min(num_cores, 4)}, pin_memory=True" in packed.text


def test_cores_are_counted_where_a_process_cannot_be_held_to_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert workers_for(4) == 3
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert workers_for(4) == 1


def test_a_thread_that_is_busy_packing_is_no_slow_source() -> None:
    packing = figures(
        period_ms=20.0, source_wait_ms=15.0, loader_ms=0.1, pin_ms=18.0, pull_ms=2.0,
        stall_ms=14.0, copy_ms=1.0, is_threaded=True,
    )  # fmt: skip
    diagnosis = diagnose(packing)
    assert diagnosis.verdict == "copy-bound (pageable)"
    assert "pin_memory=True" in diagnosis.advice
    pin, pull = packing.pull_ms, packing.pin_ms
    assert diagnose(replace(packing, pin_ms=pin, pull_ms=pull)).verdict == (
        "source-bound"
    )


def test_time_that_hides_behind_the_device_is_not_lost() -> None:
    """The source takes 60 % of the loop's time, but the device is busy meanwhile."""
    hidden = replace(STEP, source_wait_ms=Spread(6.0, 6.0, 6.0, 40))
    assert diagnose(hidden).verdict == "step-bound"


def test_a_small_batch_makes_the_loader_the_limit() -> None:
    tiny = figures(
        period_ms=0.5, between_ms=0.3, loader_ms=0.15, source_wait_ms=0.01,
        stall_ms=0.15, copy_ms=0.01, dry_share=1.0,
    )  # fmt: skip
    diagnosis = diagnose(tiny)
    assert diagnosis.verdict == "host-bound"
    assert "Larger batches" in diagnosis.advice


@pytest.mark.parametrize("batches", [0, 1, FEWEST_BATCHES - 1])
def test_few_batches_are_no_ground_for_a_verdict(batches: int) -> None:
    diagnosis = diagnose(replace(SOURCE, batches=batches))
    assert diagnosis.verdict == "undecided"
    assert diagnosis.figure == f"Too few batches to tell: {batches}."


@pytest.mark.parametrize("stats", [BUS, KERNELS])
def test_without_times_on_the_device_neither_copy_nor_transform_is_blamed(
    stats: LoaderStats,
) -> None:
    """As in a pass of no more batches than are in flight at once."""
    diagnosis = diagnose(replace(stats, copy_ms=Spread(), transform_ms=Spread()))
    assert diagnosis.verdict == "undecided"
    assert "not timed" in diagnosis.figure


def test_a_device_that_runs_dry_now_and_then_is_no_sign() -> None:
    assert diagnose(replace(READS, dry_share=RUN_DRY - 0.01)).verdict == "step-bound"


# Without a device beside the loop #


def _inline(**given: Any) -> LoaderStats:
    return replace(figures(**given), device="cpu", is_overlapped=False)


def test_on_a_cpu_the_transform_or_the_source_or_the_step_is_the_limit() -> None:
    step = _inline(period_ms=50.0, source_wait_ms=0.5, loader_ms=0.2)
    assert diagnose(step).verdict == "step-bound"
    source = _inline(period_ms=50.0, source_wait_ms=40.0, loader_ms=0.2)
    assert diagnose(source).verdict == "source-bound"
    transform = _inline(
        period_ms=50.0, source_wait_ms=0.5, loader_ms=40.0, transform_host_ms=39.5
    )
    assert diagnose(transform).verdict == "transform-bound (host)"
    assert "nothing runs beside it" in diagnose(transform).figure


@pytest.mark.parametrize(
    ("given", "part", "name"),
    [
        # Of 80.89 ms, as the demo takes them on two cores.
        ({"transform_host_ms": 11.31, "loader_ms": 11.4}, "14%", "the transform"),
        ({"source_wait_ms": 30.0, "loader_ms": 9.0}, "37%", "the source"),
        ({"loader_ms": 8.0}, "10%", "the handling of a batch"),
    ],
)
def test_in_turn_the_verdict_names_the_longest_part_and_the_advice_the_next(
    given: dict[str, float], part: str, name: str
) -> None:
    stats = _inline(period_ms=80.89, **given)
    diagnosis = diagnose(stats)
    assert diagnosis.verdict == "step-bound"
    assert "The training step takes" in diagnosis.figure
    assert diagnosis.advice.startswith(f"At most {part} to gain: {name}. ")
    beside = replace(stats, device="cuda:0", is_overlapped=True)
    assert diagnose(beside).verdict != "step-bound"


def test_in_turn_small_parts_ask_for_no_change() -> None:
    stats = _inline(period_ms=100.0, source_wait_ms=3.0, loader_ms=4.0)
    assert diagnose(stats).advice == "At most 4% to gain: the handling of a batch."


def test_in_turn_a_transform_longer_than_the_step_is_the_limit() -> None:
    stats = _inline(period_ms=50.0, transform_host_ms=24.0, loader_ms=24.1)
    assert diagnose(stats).verdict == "step-bound"
    stats = _inline(period_ms=50.0, transform_host_ms=26.0, loader_ms=26.1)
    assert diagnose(stats).verdict == "transform-bound (host)"
    # Two thirds of the time are the loader's, and the step is still the longest part.
    stats = _inline(
        period_ms=60.0, source_wait_ms=19.0, transform_host_ms=19.0, loader_ms=19.1
    )
    diagnosis = diagnose(stats)
    assert diagnosis.verdict == "step-bound"
    assert diagnosis.lost_share > 0.6


# The report #


@pytest.mark.parametrize(("verdict", "stats"), KINDS.items())
def test_the_report_is_a_few_plain_lines(verdict: str, stats: LoaderStats) -> None:
    lines = report_on(stats).splitlines()
    assert 1 < len(lines) < 10
    assert lines[1].startswith(f"verdict: {verdict}. ")
    assert lines[2].startswith("next: ")
    assert all(line.isascii() and line == line.strip() for line in lines)


def test_the_report_names_the_transform_and_what_was_noticed() -> None:
    loader = StreamPrefetchLoader(count(12), abs)
    list(loader)
    stats = replace(loader.stats(), notes=("a <leaf> is late",))
    report = report_on(stats)
    assert "12 batches" in report
    assert "transform: abs" in report
    assert "note: a <leaf> is late" in report


def test_a_report_without_batches_shows_no_figures() -> None:
    loader = StreamPrefetchLoader(count(0), abs)
    list(loader)
    assert loader.report().splitlines() == [
        "epoch 0: 0 batches, no figures",
        "verdict: undecided. Too few batches to tell: 0.",
        f"next: Look again after at least {FEWEST_BATCHES} batches.",
        "transform: abs",
    ]


def test_a_report_before_any_pass_says_so() -> None:
    loader = StreamPrefetchLoader(count(3), abs)
    batches = iter(loader)
    next(batches)
    fresh = StreamPrefetchLoader(count(3), abs)
    for report in (fresh.report(), loader.report(finished=True)):
        first, second = report.splitlines()
        assert first.startswith("no figures: there was no such pass yet. Iterate the ")
        assert second == "transform: abs"
    assert "1 batch," in loader.report()


def test_a_report_shows_a_step_once_there_was_one() -> None:
    batches = iter(loader := StreamPrefetchLoader(count(9)))
    for _ in range(2):
        next(batches)
        assert "per batch" not in loader.report()
    next(batches)
    assert "per batch, mean (p99): step " in loader.report()


def test_a_name_of_two_lines_takes_one() -> None:
    stats = replace(STEP, transform="<Augment>\nverdict: fine", notes=("a\nb",))
    report = report_on(stats)
    assert len(report.splitlines()) == len(report_on(STEP).splitlines()) + 1
    assert "transform: <Augment> verdict: fine\n" in report
    assert "&lt;Augment&gt; verdict: fine" in report._repr_html_()


def test_a_notebook_shows_the_report_as_a_table() -> None:
    table = report_on(replace(STEP, notes=("a <leaf> is late",)))._repr_html_()
    assert table.count("<tr>") == 8
    assert "a &lt;leaf&gt; is late" in table
    assert "step-bound" in table


def test_the_loader_reports_on_either_pass() -> None:
    loader = StreamPrefetchLoader(count(12))
    list(loader)
    for _ in loader:
        assert loader.report().startswith("epoch 1: ")
        assert loader.report(finished=True).startswith("epoch 0: 12 batches")
        break
