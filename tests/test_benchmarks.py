"""Do the benchmarks write down what they saw, and do the pages show just that?

The figures themselves need a GPU; here every suite runs in sizes that only show that
its code works.
"""

import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import __main__ as command_line
from benchmarks import tables
from benchmarks.loops import Over, Repeat
from benchmarks.measure import in_turns, time_loop
from benchmarks.plots import draw_speeds
from benchmarks.record import (
    Case,
    Omission,
    Ratio,
    Record,
    ratio_of,
    read_record,
    spread,
    write_record,
)
from benchmarks.suite import Group, Place, Promise, Suite, run_suite
from benchmarks.suites import SUITES, seed_classification

CPU = torch.device("cpu")

pytestmark = pytest.mark.filterwarnings("ignore")  # Kornia's and DataLoader's own.


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Keep tiny tensors off the thread pool, which costs more than they do."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def a_case(**changes: Any) -> Case:
    settings: dict[str, Any] = {
        "name": "ours",
        "group": "8 workers",
        "batch_size": 32,
        "steps_per_s": 90.5,
        "quartiles": (90.0, 91.0),
        "repeats": 3,
        "samples": (90.0, 90.5, 92.0),
        "bound_steps_per_s": 100.0,
        "of_bound": 0.905,
        "extra": {"workers": 8, "note": "none", "is_pinned": True, "missing": None},
    }
    return Case(**{**settings, **changes})


def a_record(**changes: Any) -> Record:
    ratio = Ratio("ours / seed", "8 workers", 32, 2.5, (2.4, 2.6), 3, at_least=2.0)
    settings: dict[str, Any] = {
        "suite": "in-memory",
        "device": "cuda",
        "is_tiny": False,
        "is_complete": True,
        "seconds": 12.5,
        "machine": {"gpu": "NVIDIA H200", "commit": None, "date": "2026-01-01"},
        "cases": (a_case(),),
        "ratios": (ratio,),
        "omitted": (Omission("DALI", "it is not installed"),),
    }
    return Record(**{**settings, **changes})


# Record #


def test_a_record_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "in-memory--x.json"
    write_record(a_record(), path)
    assert read_record(path) == a_record()
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.pop("machine"), r"record lacks \['machine'\]"),
        (lambda r: r.update(speed=1), r"unknown \['speed'\]"),
        (lambda r: r.update(seconds="3"), r"record\.seconds must be float, got '3'"),
        (lambda r: r.update(is_tiny=1), r"record\.is_tiny must be bool, got 1"),
        (lambda r: r.update(schema=99), r"schema is 99; this code reads 1"),
        (lambda r: r.update(cases={}), r"record\.cases must be a list"),
        (
            lambda r: r["cases"][0].update(batch_size=3.5),
            r"record\.cases\[0\]\.batch_size must be int, got 3\.5",
        ),
        (
            lambda r: r["cases"][0].update(launches="many"),
            r"cases\[0\]\.launches must be float, got 'many'",
        ),
        (
            lambda r: r["cases"][0].update(quartiles=[1.0]),
            r"cases\[0\]\.quartiles must be 2 values",
        ),
        (
            lambda r: r["cases"][0].update(extra={"a": [1]}),
            r"cases\[0\]\.extra\.a must be",
        ),
    ],
)
def test_what_is_no_record_is_refused_by_its_path(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    written = a_record().to_json()
    change(written)
    path = tmp_path / "x.json"
    path.write_text(json.dumps(written))
    with pytest.raises(ValueError, match=message):
        read_record(path)


def test_every_committed_result_is_a_record_of_a_gpu() -> None:
    for suite in SUITES:
        for path in tables.RESULTS.glob(f"{suite.name}--*.json"):
            record = read_record(path)
            assert record.suite == suite.name
            assert record.machine["gpu"]
            assert not record.is_tiny
            assert path.name == command_line.record_name(suite.name, record.machine)


def test_quartiles_and_ratios_are_taken_within_rounds() -> None:
    assert spread([3.0]) == (3.0, (3.0, 3.0))
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == (3.0, (2.0, 4.0))
    # The second variant took part in two rounds only.
    assert ratio_of([2.0, 9.0, 7.0], [1.0, 3.0]) == (2.0, 3.0)


def test_a_promise_is_kept_or_missed() -> None:
    ratio = a_record().ratios[0]
    assert ratio.passed is True
    assert dataclasses.replace(ratio, value=1.9).passed is False
    assert dataclasses.replace(ratio, at_least=None).passed is None


# Running #


def test_variants_take_turns_in_another_order_each_round() -> None:
    assert list(in_turns(["a", "b", "c"], 2)) == [
        *[(0, "a"), (0, "b"), (0, "c")],
        *[(1, "b"), (1, "c"), (1, "a")],
    ]


def test_a_loop_is_timed_after_its_warm_up_and_closed() -> None:
    events: list[str] = []

    class Batches:
        pinned_bytes = 5

        def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.zeros(1), torch.zeros(1)

        def close(self) -> None:
            events.append("closed")

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        events.append("step")

    timing = time_loop(lambda: Over(Batches(), step), CPU, steps=3, warmup=2)
    assert events == ["step"] * 5 + ["closed"]
    assert timing.steps_per_s == pytest.approx(3 / (timing.ended - timing.started))


def _group(**changes: Any) -> Group:
    settings: dict[str, Any] = {
        "name": "",
        "batch_size": 2,
        "step": lambda images, labels: None,
        "variants": {"bound": _idle, "slow": _idle},
        "bound": "bound",
        "steps": 2,
        "warmup": 1,
        "rounds": 3,
        "is_probed": False,
        "promises": [Promise("slow / bound", "slow", "bound", at_least=0.1)],
    }
    return Group(**{**settings, **changes})


def _idle(step: object) -> Repeat:
    return Repeat(lambda: None)


def _run(*groups: Group, **settings: Any) -> tuple[Record, list[Record]]:
    suite = Suite(
        "x",
        "a test",
        **{"budget_s": 60.0, "groups": lambda place: iter(groups)} | settings,
    )
    saved: list[Record] = []
    record = run_suite(suite, Place(CPU), {"gpu": None}, saved.append)
    return record, saved


def test_a_suite_gives_a_case_for_each_variant_and_saves_on_its_way() -> None:
    record, saved = _run(_group(fewer_rounds={"slow": 2}), _group(batch_size=4))
    found = [(case.name, case.batch_size, case.repeats) for case in record.cases]
    assert found == [("bound", 2, 3), ("slow", 2, 2), ("bound", 4, 3), ("slow", 4, 3)]
    assert record.case("bound", group="", batch_size=2).of_bound == 1.0  # type: ignore[union-attr]
    assert [ratio.repeats for ratio in record.ratios] == [2, 3]
    assert record.is_complete
    assert [len(one.cases) for one in saved] == [2, 4, 4]
    assert [one.is_complete for one in saved] == [False, False, True]


def test_a_variant_that_fails_costs_itself_only() -> None:
    def broken(step: object) -> Repeat:
        raise RuntimeError("no such kernel")

    record, _ = _run(_group(variants={"bound": _idle, "slow": broken}))
    assert [case.name for case in record.cases] == ["bound"]
    assert record.omitted == (
        Omission("B=2, slow, round 1", "RuntimeError: no such kernel"),
    )
    assert not record.is_complete


def test_what_has_no_time_is_listed() -> None:
    record, _ = _run(_group(), budget_s=0.0)
    assert record.cases == ()
    assert not record.is_complete
    assert "0 s were over" in record.omitted[0].reason


def test_what_is_not_installed_leaves_a_suite_complete() -> None:
    missing = Omission("DALI", "it is not installed")
    record, _ = _run(_group(), omissions=lambda: [missing])
    assert record.is_complete
    assert record.omitted == (missing,)


# Command line #


@pytest.mark.timeout(110)
@pytest.mark.parametrize("suite", [suite.name for suite in SUITES])
def test_a_suite_runs_in_tiny_sizes_and_is_not_run_twice(
    suite: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [suite, "--tiny", "--out-dir", str(tmp_path), "--device", "cpu"]
    assert command_line.main(arguments) == 0
    (path,) = tmp_path.iterdir()
    record = read_record(path)
    assert record.is_tiny
    assert record.is_complete
    assert record.cases
    written = path.read_bytes()
    assert command_line.main(arguments) == 0
    assert "complete already" in capsys.readouterr().out
    assert path.read_bytes() == written
    rendered = tables.render_all({suite: record})
    assert rendered, suite
    for text in rendered.values():
        assert "nan" not in text


def test_an_unknown_suite_is_refused_with_the_known_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        command_line.main(["in-memroy"])
    assert "Choose from: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    [
        {"is_complete": False},
        {"is_tiny": True},
        {"machine": {"gpu": "NVIDIA H200", "benchmarks_sha256": "other"}},
    ],
)
def test_only_a_complete_record_of_the_same_code_is_kept(
    tmp_path: Path, change: Mapping[str, Any]
) -> None:
    machine = {"gpu": "NVIDIA H200", "commit": "a", "date": "2026-02-02"}
    path = tmp_path / "in-memory--nvidia-h200.json"

    def find() -> Path | None:
        return command_line.find_complete(
            "in-memory", machine, [tmp_path], is_tiny=False
        )

    assert find() is None
    write_record(a_record(), path)
    assert find() == path
    write_record(a_record(**change), path)
    assert find() is None


# Pages #


def test_tables_stand_between_their_markers_and_only_there() -> None:
    page = "a\n<!-- table: x -->\nold | y\n<!-- /table -->\nb\n"
    filled = tables.fill(page, {"x": "| new |"})
    assert filled == "a\n<!-- table: x -->\n\n| new |\n\n<!-- /table -->\nb\n"
    assert tables.fill(filled, {"x": "| new |"}) == filled
    assert "Not measured yet" in tables.fill(filled, {})


def test_the_newest_record_that_means_something_is_shown(tmp_path: Path) -> None:
    def write(gpu: str, date: str, *, is_tiny: bool = False) -> None:
        machine = {"gpu": gpu, "date": date}
        record = a_record(machine=machine, is_tiny=is_tiny)
        write_record(record, tmp_path / f"in-memory--{gpu}.json")

    write("a", "2026-01-01")
    write("b", "2026-03-01")
    write("c", "2026-04-01", is_tiny=True)
    (found,) = tables.newest_records(tmp_path).values()
    assert found.machine["gpu"] == "b"


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda path: path.parent.name)
def test_the_pages_show_the_committed_results(page: Path) -> None:
    """If this fails: python -m benchmarks.tables --plots."""
    shown = page.read_text()
    rendered = tables.render_all(tables.newest_records()) | tables.render_figures()
    assert tables.fill(shown, rendered) == shown
    markers = re.findall(r"<!-- table: ([\w-]+) -->", shown)
    assert len(markers) == shown.count("<!-- /table -->")
    measured = {suite.name for suite in SUITES} & set(tables.newest_records())
    if measured == {suite.name for suite in SUITES}:
        assert set(markers) <= set(rendered)


def test_pictures_are_drawn_of_what_was_measured(tmp_path: Path) -> None:
    bound = a_case(name="bound", of_bound=1.0)
    larger = a_case(batch_size=64)  # The bound was not measured there.
    record = a_record(cases=(a_case(), bound, larger))
    path = tmp_path / "x.png"
    draw_speeds(
        record,
        path,
        group="8 workers",
        names=("bound", "ours", "never measured"),
        heading="h",
    )
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_classification_times_ten_times_what_is_prefetched() -> None:
    for cell in seed_classification.cells(Place(torch.device("cuda"))):
        ready = cell.num_workers * cell.prefetch_factor
        for name in cell.names:
            is_in_workers = name == seed_classification.IN_WORKERS
            prefetched = ready if is_in_workers else ready + 2
            assert cell.steps_of(name) >= 10 * prefetched, (cell, name)


def test_promised_ratios_have_three_rounds() -> None:
    promised = seed_classification.cells(Place(torch.device("cuda")))[0]
    assert promised.rounds >= 3
    named = {
        name
        for one in seed_classification.promises(promised)
        for name in (one.over, one.under)
    }
    assert not named & set(promised.once)


def test_every_name_of_a_group_is_in_its_variants() -> None:
    for suite in SUITES:
        if suite.groups is None:
            continue
        for group in itertools.islice(suite.groups(Place(CPU, is_tiny=True)), 3):
            named = {group.bound, *group.other_steps, *group.fewer_rounds}
            named |= {one.over for one in group.promises}
            named |= {one.under for one in group.promises}
            assert named <= set(group.variants), (suite.name, group.name)
