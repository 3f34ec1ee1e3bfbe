"""Does the benchmark for two GPUs run, and does it judge what it measured?"""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks import ddp
from benchmarks.targets import TINY


def test_one_rank_measures_every_pipeline() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        speeds = ddp.measure(TINY, torch.device("cpu"))
    finally:
        dist.destroy_process_group()
    assert set(speeds) >= {"bound", ddp._HELD}
    for samples in speeds.values():
        assert len(samples) == TINY.rounds
        assert min(samples) > 0


_RUNS: list[dict[str, Any]] = [
    {
        "num_ranks": 1,
        "steps_per_s": {"bound": [100.0, 200.0], ddp._HELD: [99.0, 198.0]},
    },
    {"num_ranks": 2, "steps_per_s": {"bound": [80.0, 120.0], ddp._HELD: [79.2, 118.8]}},
]


def _missed(runs: list[dict[str, Any]]) -> set[str]:
    figures = ddp.join_runs(runs)
    return {figure["name"] for figure in figures if figure["passed"] is False}


def test_figures_are_ratios_of_the_same_round() -> None:
    values = {figure["name"]: figure["value"] for figure in ddp.join_runs(_RUNS)}
    assert values[f"1 GPU: {ddp._HELD}, of bound"] == pytest.approx(0.99)
    assert values["scaling, 2 GPUs over 2 x 1: bound"] == pytest.approx(100 / 150, 1e-3)
    assert not _missed(_RUNS)


def test_meta_a_pipeline_that_scales_worse_than_the_step_is_seen() -> None:
    runs = copy.deepcopy(_RUNS)
    runs[1]["steps_per_s"][ddp._HELD] = [76.0, 114.0]
    assert _missed(runs) == {
        f"2 GPUs: {ddp._HELD}, of bound",
        "scaling of ours, fused chain, over that of the bound",
    }
