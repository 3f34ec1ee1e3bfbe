"""Does the probe measure what it says, and draw the right conclusion from it?"""

import json
import random
import re
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from gpuprefetch import StreamPrefetchLoader
from gpuprefetch.cli.probe import format_probe
from gpuprefetch.errors import SettingError
from gpuprefetch.gain import Gain, interval_of_median
from gpuprefetch.probe import Effort, Probe, probe
from tests.fake_clock import FakeClock
from tests.sources import count

pytestmark = pytest.mark.timeout(60)

CPU = torch.device("cpu")
SHORT = Effort(rounds=3, batches=6)


class Slow:
    """Works on each of 12 batches."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.work = work

    def __iter__(self) -> Iterator[torch.Tensor]:
        for i in range(12):
            self.work()
            yield torch.full((4,), float(i))


# The interval #


@pytest.mark.parametrize(
    ("count", "kept", "confidence"),
    [(1, 0, 0.0), (3, 0, 0.75), (5, 0, 0.9375), (6, 0, 0.96875), (9, 1, 0.9609375)],
)
def test_the_interval_drops_as_many_extremes_as_it_may(
    count: int, kept: int, confidence: float
) -> None:
    values = [float(value) for value in range(count)]
    random.shuffle(values)
    assert interval_of_median(values) == (kept, count - 1 - kept, confidence)


def test_the_interval_covers_the_median_as_often_as_it_says() -> None:
    hits = []
    for _ in range(2000):
        values = [random.expovariate(1.0) for _ in range(6)]
        low, high, confidence = interval_of_median(values)
        hits.append(low <= 0.6931 <= high)
    assert statistics.fmean(hits) == pytest.approx(confidence, abs=0.02)


@pytest.mark.parametrize(
    ("gain", "answer"),
    [
        (Gain(1.5, 1.4, 1.6, 0.97), "helps"),
        (Gain(1.5, 0.9, 1.6, 0.97), "cannot tell"),
        (Gain(1.3, 0.85, 1.81, 0.97), "cannot tell"),
        (Gain(0.9, 0.13, 1.17, 0.97), "cannot tell"),
        (Gain(1.0, 0.89, 1.0, 0.97), "cannot tell"),
        (Gain(1.0, 0.91, 1.09, 0.97), "does not help"),
        (Gain(1.01, 1.005, 1.02, 0.97), "does not help"),
        (Gain(0.99, 0.98, 0.995, 0.97), "does not help"),
        (Gain(0.8, 0.7, 0.9, 0.97), "slower"),
        # Of two, three and five rounds: the interval holds the median too seldom.
        (Gain(1.5, 1.4, 1.6, 0.5), "cannot tell"),
        (Gain(1.0, 0.99, 1.01, 0.75), "cannot tell"),
        (Gain(0.8, 0.7, 0.9, 0.9375), "cannot tell"),
    ],
)
def test_a_gain_counts_if_it_shows(gain: Gain, answer: str) -> None:
    assert gain.answer == answer


# What is said of it #

ON_A_GPU = Probe(
    device="meta", rounds=6, batches=50, loader_ms=4.0, step_ms=8.0, transform_ms=2.0,
    plain_ms=12.0, ours_ms=8.1, limit="step", limit_ms=8.0, is_overlapped=True,
    gain=Gain(1.48, 1.45, 1.5, 0.97), verdict="step-bound", figure="x.", advice="y.",
)  # fmt: skip
ON_A_CPU = replace(
    ON_A_GPU, device="cpu", plain_ms=14.2, ours_ms=14.1, limit="all parts in turn",
    limit_ms=14.0, is_overlapped=False, gain=Gain(1.0, 0.97, 1.04, 0.97),
)  # fmt: skip


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (ON_A_GPU, "at most 1.50 x as fast; the limit is step, 8.00 ms"),
        (replace(ON_A_GPU, plain_ms=8.0), "nothing to gain; the limit is step"),
        (ON_A_CPU, "nothing from overlap: cpu does one thing at a time; the limit is "),
        # Faster than the parts it consists of.
        (
            replace(ON_A_GPU, ours_ms=7.0),
            "too noisy to say: a whole loop takes 7.00 ms",
        ),
        (replace(ON_A_CPU, plain_ms=9.0), "too noisy to say: a whole loop takes 9.00 "),
        # Within what two runs differ by; and ours may run a fused transform.
        (replace(ON_A_CPU, plain_ms=13.5, ours_ms=9.0), "nothing from overlap"),
    ],
)
def test_no_more_is_expected_than_the_parts_allow(result: Probe, expected: str) -> None:
    assert f"\nexpected: {expected}" in format_probe(result)
    is_told = result.is_overlapped and not result.is_contradicted
    assert (result.expected_gain is not None) is is_told


def test_a_wide_interval_is_no_answer() -> None:
    wide = replace(ON_A_CPU, gain=Gain(1.1, 0.85, 1.81, 0.97))
    assert "answer:   Cannot tell: the runs differ too much." in format_probe(wide)
    assert "--rounds" in format_probe(wide)
    assert "the difference is too small to show" not in format_probe(wide)
    assert "the difference is too small to show" in format_probe(ON_A_CPU)


@pytest.mark.parametrize(
    ("result", "is_told"),
    [
        (replace(ON_A_CPU, plain_ms=60.0), True),
        (replace(ON_A_CPU, ours_ms=60.0), True),
        (replace(ON_A_CPU, ours_ms=60.0, transform_ms=None), True),
        (ON_A_CPU, False),
        (replace(ON_A_CPU, plain_ms=27.0), False),
        # Copies are no part that was measured alone.
        (replace(ON_A_GPU, plain_ms=60.0), False),
        # Handling a batch takes longer than doing nothing with it.
        (
            replace(
                ON_A_CPU, loader_ms=0.01, step_ms=0.01, transform_ms=0.01, ours_ms=0.2,
                plain_ms=0.1,
            ),
            False,
        ),
    ],
)  # fmt: skip
def test_parts_that_compete_for_the_cores_are_pointed_out(
    result: Probe, is_told: bool
) -> None:
    assert result.is_crowded is is_told
    assert result.as_dict()["is_crowded"] is is_told
    lines = format_probe(result).splitlines()
    notes = [line for line in lines if line.startswith("note:     ")]
    assert len(notes) == is_told
    assert all("a whole loop takes 60.00 ms" in note for note in notes)
    assert all("OMP_NUM_THREADS=1" in note for note in notes)


def test_too_few_rounds_are_no_answer() -> None:
    few = replace(ON_A_GPU, rounds=2, gain=Gain(1.5, 1.4, 1.6, 0.5))
    (answer,) = re.findall(r"^answer: +(.*)$", format_probe(few), re.MULTILINE)
    assert answer.startswith("Cannot tell from 2 rounds: ")
    assert "--rounds 6" in answer
    assert "answer:   It helps." in format_probe(ON_A_GPU)


# Measurements #


def test_the_parts_are_measured_alone(fake_clock: FakeClock) -> None:
    def transform(x: torch.Tensor) -> torch.Tensor:
        fake_clock.pass_ms(6)
        return x + 1

    seen: list[torch.Tensor] = []

    def step(x: torch.Tensor) -> None:
        seen.append(x)
        fake_clock.pass_ms(3)

    source = Slow(lambda: fake_clock.pass_ms(9))
    effort = Effort(rounds=6, batches=6)
    result = probe(source, step, transform, device=CPU, effort=effort)
    assert result.loader_ms == pytest.approx(9, abs=0.1)
    assert result.step_ms == pytest.approx(3, abs=0.1)
    assert result.transform_ms == pytest.approx(6, abs=0.1)
    # On a CPU they take turns, in either loop.
    assert result.limit == "all parts in turn"
    assert result.plain_ms == pytest.approx(18, abs=0.1)
    assert result.ours_ms == pytest.approx(18, abs=0.3)
    assert result.gain.answer == "does not help"
    assert result.verdict == "source-bound"
    # Each batch was transformed, in both loops and in the step alone.
    assert {float(x[0]) for x in seen} <= {float(i) for i in range(1, 13)}


@pytest.mark.parametrize("rounds", [3, 4])
@pytest.mark.parametrize("slow", [0, 1, 2])
def test_the_verdict_is_of_the_round_that_the_table_shows(
    fake_clock: FakeClock, rounds: int, slow: int
) -> None:
    """Each pass of the source takes another time; most are held back by the source."""
    of_passes_ms = iter([9, 9, *([1, 2, 20, 30, 10, 12, 40, 7][slow:]), 0, 0, 0, 0])

    class Unsteady:
        def __iter__(self) -> Iterator[torch.Tensor]:
            work_ms = next(of_passes_ms)
            for i in range(12):
                fake_clock.pass_ms(work_ms)
                yield torch.full((4,), float(i))

    effort = Effort(rounds=rounds, batches=6)
    result = probe(
        Unsteady(), lambda x: fake_clock.pass_ms(5), device=CPU, effort=effort
    )
    told = re.search(r" of (\d+\.\d+) ms a batch", result.figure)
    assert told
    assert float(told[1]) == pytest.approx(result.ours_ms, abs=0.1)
    assert (result.verdict == "source-bound") is (result.ours_ms > 10)


def test_a_gain_is_seen_where_there_is_one(
    fake_clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain loop that is slow on purpose."""
    from gpuprefetch import probe as module

    move = module._Parts.move

    def slow_move(parts: module._Parts, batch: torch.Tensor) -> object:
        fake_clock.pass_ms(10)
        return move(parts, batch)

    monkeypatch.setattr(module._Parts, "move", slow_move)
    effort = Effort(rounds=6, batches=6)
    result = probe(
        count(20), lambda x: fake_clock.pass_ms(2), device=CPU, effort=effort
    )
    assert result.gain.answer == "helps"
    assert result.gain.median > 2
    assert result.gain.low <= result.gain.median <= result.gain.high
    assert result.expected_gain is None, "nothing overlaps on a CPU"
    assert result.transform_ms is None


def test_a_result_is_json() -> None:
    result = probe(count(20), lambda x: None, device=CPU, effort=SHORT)
    assert isinstance(result, Probe)
    read = json.loads(json.dumps(result.as_dict()))
    assert read["rounds"] == 3
    assert read["batches"] == 6
    assert read["gain"]["confidence"] == 0.75
    assert read["answer"] in ("helps", "does not help", "slower", "cannot tell")
    assert read["expected_gain"] is None


def test_the_number_of_batches_follows_from_the_time_there_is(
    fake_clock: FakeClock,
) -> None:
    def work() -> None:
        fake_clock.pass_ms(4)

    effort = Effort(rounds=1, budget_s=0.4)
    result = probe(Slow(work), lambda x: work(), device=CPU, effort=effort)
    # Two loops of 8 ms a batch in 400 ms: 25 each, 3 of which warm up.
    assert result.batches in (21, 22)


def test_an_empty_loader_is_refused() -> None:
    with pytest.raises(SettingError, match="gives no batches"):
        probe([], lambda x: None, device=CPU, effort=SHORT)


def test_a_loader_of_ours_is_refused_since_the_plain_loop_is_needed() -> None:
    loader = StreamPrefetchLoader([torch.ones(1)])
    with pytest.raises(SettingError, match="Pass the DataLoader that it wraps"):
        probe(loader, lambda x: None, device=CPU, effort=SHORT)


def test_a_loader_that_can_be_iterated_once_is_refused() -> None:
    with pytest.raises(SettingError, match="can be iterated once"):
        probe(iter(count(9)), lambda x: None, device=CPU, effort=SHORT)
