"""Do suites measure in turns, write down what they saw, and say what they did not?

The figures themselves need a GPU; here every suite runs in sizes that only show that
its code works.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import __main__ as command_line
from benchmarks import tables
from benchmarks.loops import Over, Repeat
from benchmarks.measure import in_turns, time_loop
from benchmarks.record import (
    Omission,
    Record,
    read_record,
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


def test_what_earlier_suites_left_is_not_counted_as_a_variants_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("benchmarks.suite.allocated_bytes", lambda device: 1000)
    monkeypatch.setattr("benchmarks.measure._peak_device_bytes", lambda device: 1700)
    record, _ = _run(_group())
    assert [case.peak_device_bytes for case in record.cases] == [700, 700]


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
    assert record.omitted == (Omission("further groups", "0 s were over"),)


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


@pytest.mark.gpu
@pytest.mark.timeout(110)
@pytest.mark.parametrize(
    "suite", ["seed-classification", "seed-encoder-decoder", "in-memory", "transform"]
)
def test_a_suite_runs_on_a_gpu_and_looks_into_its_pipelines(
    suite: str, tmp_path: Path
) -> None:
    arguments = [suite, "--tiny", "--out-dir", str(tmp_path), "--device", "cuda"]
    assert command_line.main(arguments) == 0
    (path,) = tmp_path.iterdir()
    record = read_record(path)
    assert record.is_complete, record.omitted
    in_here = [case for case in record.cases if "compile_s" not in case.extra]
    assert all(case.peak_device_bytes for case in in_here)
    probed = [case for case in record.cases if case.launches is not None]
    assert probed or suite == "seed-classification"
    for case in probed:
        if case.name == "ours, fused (chained)":
            assert case.host_syncs == 0


def test_an_unknown_suite_is_refused_with_the_known_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        command_line.main(["in-memroy"])
    assert "Choose from: " in capsys.readouterr().err


def test_a_suite_that_is_not_begun_keeps_its_old_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["in-memory", "--tiny", "--out-dir", str(tmp_path), "--device", "cpu"]
    assert command_line.main([*arguments, "--budget-s", "0"]) == 1
    assert "in-memory: not begun" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_the_classification_times_ten_times_what_is_prefetched() -> None:
    for cell in seed_classification.cells(Place(torch.device("cuda"))):
        ready = cell.num_workers * cell.prefetch_factor
        for name in cell.names:
            is_in_workers = name == seed_classification.IN_WORKERS
            prefetched = ready if is_in_workers else ready + 4
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
