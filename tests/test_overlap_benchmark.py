"""Does the benchmark of overlap write down what is in the traces it has recorded?

There is no GPU here, so the traces are synthetic ones; all else is the real way.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.record import Record
from benchmarks.suite import Place, Suite, run_suite
from benchmarks.suites import overlap
from benchmarks.suites.overlap import SUITE
from tests.synthetic_trace import Loop, write_trace


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Record:
    """What is recorded where a GPU would have run these loops."""

    def write(batches: str, _step: object, path: Path, **_: Any) -> list[float]:
        write_trace(path, Loop(is_plain=batches == "plain").build())
        return [190.0, 200.0, 210.0]

    monkeypatch.setattr(overlap, "ClassificationStep", lambda *_: None)
    monkeypatch.setattr(overlap, "start_pipeline", lambda name, *_: name)
    monkeypatch.setattr(overlap, "record_trace", write)
    suite = Suite("overlap", "", 60.0, run=lambda run: overlap.measure(run, tmp_path))
    return run_suite(suite, Place(torch.device("cuda")), {}, lambda _: None)


def test_the_record_says_what_is_hidden(record: Record) -> None:
    assert record.is_complete, record.omitted
    ours, plain = record.cases
    assert [ours.name, plain.name] == list(overlap.NAMES.values())
    assert ours.extra["inside_share"] == 1.0
    assert float(ours.extra["hidden_share"] or 0) > 0.95
    assert ours.extra["copy_us"] == pytest.approx(121.0)
    assert ours.gpu_ms == pytest.approx(0.157)
    assert ours.extra["median_steps_ahead"] == 4.0
    assert plain.extra["hidden_share"] == plain.extra["inside_share"] == 0.0
    assert plain.extra["transform_us"] == pytest.approx(36.0)
    assert (ours.steps_per_s, ours.repeats) == (200.0, 3)


def test_the_figures_are_kept_batch_by_batch(record: Record, tmp_path: Path) -> None:
    figures = json.loads((tmp_path / "overlap-ours.figures.json").read_text())
    assert len(figures["batches"]) == len(figures["steps"]) == 12
    assert figures["side_stream"] == 20
    last = figures["batches"][-1]
    assert last["inside_step"] < last["used_by_step"]
    assert last["copy_us"] == pytest.approx(121.0)
    plain = json.loads((tmp_path / "overlap-plain.figures.json").read_text())
    assert {batch["inside_step"] for batch in plain["batches"]} == {None}


def test_table_and_pictures_are_made_of_the_record(
    record: Record, tmp_path: Path
) -> None:
    assert SUITE.tables is not None
    assert SUITE.plots is not None
    shown = SUITE.tables(record)["overlap"]
    assert "|  | ours, fused (chained) | plain loop, fused (chained) |" in shown
    assert "| copies, per batch | 121 us | 121 us |" in shown
    assert "| batches made ready within an earlier step | 100.0% | 0.0% |" in shown
    folder = tmp_path / "pictures"
    folder.mkdir()
    SUITE.plots(record, folder)
    names = {path.name for path in folder.iterdir()}
    assert names == {"overlap.png", "overlap-plain.png"}


def test_a_picture_whose_trace_is_gone_is_left_alone(
    record: Record, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in tmp_path.glob("*.gz"):
        path.unlink()
    assert SUITE.plots is not None
    SUITE.plots(record, tmp_path)
    assert "left as it is" in capsys.readouterr().out
    assert not list(tmp_path.glob("*.png"))
