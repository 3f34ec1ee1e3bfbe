"""Is a benchmark's record what it says, and do the pages show just that?"""

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as command_line
from benchmarks import tables
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
from benchmarks.suites import SUITES


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
    # A picture of a trace is drawn where the trace is: not of every record there is.
    needed = {marker for marker in markers if marker != "overlap-picture"}
    if measured == {suite.name for suite in SUITES}:
        assert needed <= set(rendered)


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
