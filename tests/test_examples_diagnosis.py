"""Does each loop of ``examples/diagnosis`` provoke the verdict that it is named for?

Run in processes of their own, one after the other: times are compared within a loop.
"""

import json
from pathlib import Path

import pytest
import torch

from gpuprefetch.diagnose import Verdict
from tests.children import run_script

FOLDER = Path(__file__).resolve().parent.parent / "examples" / "diagnosis"

ON_A_CPU: dict[str, Verdict] = {
    "source_bound": "source-bound",
    "transform_bound_host": "transform-bound (host)",
    "step_bound": "step-bound",
}
ON_A_GPU: dict[str, Verdict] = {
    **ON_A_CPU,
    "copy_bound_pageable": "copy-bound (pageable)",
    "copy_bound_bus": "copy-bound (bus)",
    "transform_bound_device": "transform-bound (device)",
    "host_bound": "host-bound",
}

# What the log says beside the report belongs to the loop, too.
_RUN = """\
import importlib, json, logging, sys
import torch
torch.set_num_threads(2)
logging.getLogger("gpuprefetch").setLevel(logging.ERROR)
sys.path.insert(0, sys.argv[1])
report = importlib.import_module(sys.argv[2]).main()
assert torch.get_num_threads() == 1, "main() is to use one thread"
print(json.dumps(report))
"""


def report_of(name: str) -> list[str]:
    out = run_script(_RUN, str(FOLDER), name, limit_s=100)
    lines: list[str] = json.loads(out).splitlines()
    return lines


@pytest.mark.skipif(torch.cuda.is_available(), reason="the same scripts run on the GPU")
@pytest.mark.parametrize(("name", "verdict"), ON_A_CPU.items())
def test_a_loop_on_a_cpu_gets_its_verdict(name: str, verdict: Verdict) -> None:
    assert report_of(name)[1].startswith(f"verdict: {verdict}. ")


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "verdict"), ON_A_GPU.items())
def test_a_loop_on_a_gpu_gets_its_verdict(name: str, verdict: Verdict) -> None:
    lines = report_of(name)
    assert lines[1].startswith(f"verdict: {verdict}. "), "\n".join(lines)


def test_every_script_is_run_and_explained() -> None:
    scripts = {path.stem for path in FOLDER.glob("*_bound*.py")}
    assert scripts == ON_A_GPU.keys()
    page = (FOLDER.parent.parent / "docs" / "diagnosis.md").read_text()
    for name in scripts:
        assert f"<!-- report: {name} -->" in page, name
        assert f"examples/diagnosis/{name}.py" in page, name
