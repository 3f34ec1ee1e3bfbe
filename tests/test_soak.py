"""Does the soak see memory that grows, and does it end in time?"""

import itertools
import mmap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.record import Record
from benchmarks.soak import GrewError, Limits, Sample, Served, growth, soak
from benchmarks.suite import Place, run_suite
from benchmarks.suites import scale
from gpuprefetch import StreamPrefetchLoader

CPU = torch.device("cpu")


def _samples(**slopes: float) -> list[Sample]:
    """Forty looks at memory that grows by some bytes per batch."""

    def held(field: str, batches: int) -> int:
        noise = 4096 * (batches % 3)
        return int(1e9 + slopes.get(field, 0.0) * batches + noise)

    return [
        Sample(n, n / 1e4, held("device", n), held("pinned", n), held("rss", n))
        for n in range(2_500, 100_001, 2_500)
    ]


def test_noise_is_no_growth() -> None:
    Limits().check(_samples())
    assert abs(growth(_samples(), "rss_bytes")) < 10_000


@pytest.mark.parametrize(
    ("field", "slope"), [("device", 512.0), ("pinned", 64.0), ("rss", 400.0)]
)
def test_growth_is_seen_and_named(field: str, slope: float) -> None:
    samples = _samples(**{field: slope})
    assert growth(samples, f"{field}_bytes") == pytest.approx(slope * 1e5, rel=0.01)
    with pytest.raises(GrewError, match=f"{field}_bytes grew by .* 100000 batches"):
        Limits().check(samples)


def test_what_fills_up_at_the_begin_is_no_growth() -> None:
    first, *others = _samples()
    early = Sample(first.batches, first.seconds, 0, 0, 0)
    Limits().check([early, *others])


class _Leaky:
    """A source that keeps some pages of memory for each batch it serves."""

    def __init__(self) -> None:
        self.kept: list[mmap.mmap] = []

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(100):
            # Pages of its own: Python's heap may have room for it already.
            pages = mmap.mmap(-1, 65_536)
            pages.write(b"x" * 65_536)
            self.kept.append(pages)
            yield torch.ones(2)


@pytest.mark.parametrize("leaks", [False, True])
def test_a_leak_of_the_process_is_seen(leaks: bool) -> None:
    source: Any = _Leaky() if leaks else Served([torch.ones(2)], per_pass=100)
    with StreamPrefetchLoader(source, device=CPU) as loader:
        samples = soak(loader, device=CPU, num_batches=1000, every=25, limit_s=60)
    assert [sample.batches for sample in samples] == list(range(25, 1001, 25))
    grown = growth(samples, "rss_bytes")
    assert (grown > 40e6) is leaks, grown


def test_a_soak_ends_when_its_time_is_over() -> None:
    ticks = itertools.count()
    with StreamPrefetchLoader(Served([torch.ones(2)], 10), device=CPU) as loader:
        samples = soak(
            loader,
            device=CPU,
            num_batches=10**9,
            every=4,
            limit_s=5,
            clock=lambda: float(next(ticks)),
        )
    assert [sample.batches for sample in samples] == [4, 8, 12, 16, 20, 24]


# The suite #


@pytest.fixture(scope="module")
def record() -> Record:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    record = run_suite(scale.SUITE, Place(CPU, is_tiny=True), {}, lambda _: None)
    torch.set_num_threads(threads)
    return record


@pytest.mark.timeout(170)
@pytest.mark.filterwarnings("ignore")
def test_each_axis_has_a_table_and_a_panel(record: Record, tmp_path: Path) -> None:
    assert record.is_complete, record.omitted
    assert scale.SUITE.tables is not None
    assert scale.SUITE.plots is not None
    shown = scale.SUITE.tables(record)
    heads = {name: text.partition("\n")[0] for name, text in shown.items()}
    assert heads["scale-batch"] == "| images in a batch | 1 | 2 |"
    assert heads["scale-image"] == "| pixels | 16 | 32 |"
    assert heads["scale-leaves"] == "| leaves | 1 | 2 |"
    assert "ours, fused (chained), us" in shown["scale-batch"]
    assert "ours, copy only, pageable source, us" in shown["scale-leaves"]
    assert "| depth 2 |" in shown["scale-depth"]
    assert "| fused, pinned | 20 |" in shown["scale-soak"]
    scale.SUITE.plots(record, tmp_path)
    assert (tmp_path / "scale.png").stat().st_size > 10_000


def test_the_axes_go_as_far_as_they_should() -> None:
    """The sizes of a GPU's run, which nothing here is large enough to measure."""
    assert max(scale._BATCH_SIZES) == 1024
    assert max(scale._IMAGE_SIZES) == 1024
    assert max(scale._LEAVES) == 200
    assert scale._DEPTHS == (1, 2, 4, 8)
    assert max(scale._SOAKS.values()) == 100_000


def test_the_table_says_which_soak_ended_before_its_number(record: Record) -> None:
    cases = (
        scale._soak_case(name, _samples()[:34], asked=asked)
        for name, asked in (("short", 100_000), ("whole", 85_000))
    )
    shown = scale._soak_table(replace(record, cases=tuple(cases)))
    assert "| short | 85,000 of 100,000: 8 s were over |" in shown
    assert "| whole | 85,000 |" in shown


def test_a_soak_leaves_time_for_the_rest_of_its_suite() -> None:
    assert set(scale._SOAK_LIMIT_S) == set(scale._SOAKS)
    # All that grows took 23 s on an H200.
    assert sum(scale._SOAK_LIMIT_S.values()) + 2 * 23 <= scale.SUITE.budget_s
