"""Do the fixtures around every test see what they are there to see?

Each planted fault is a small test of its own, run by a pytest in another process.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(120)

PLANTED = """
import random, subprocess, sys, threading
import pytest, torch
import tests.leaks

def test_leaks_a_thread():
    thread = threading.Thread(
        target=threading.Event().wait, name=tests.leaks.FEEDER_NAME, daemon=True
    )
    thread.start()

child = None

def test_leaks_a_process():
    global child
    child = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"],
        stdout=subprocess.DEVNULL,
    )

def test_leaves_nothing():
    child.kill()
    child.wait()

seen = []

@pytest.mark.parametrize("time", [1, 2])
def test_starts_from_the_same_random_state(time):
    seen.append((random.random(), float(torch.rand(1))))
    assert len(set(seen)) == 1
    torch.set_default_device("meta")

def test_needs_a_device(device):
    assert device.type in ("cpu", "cuda")
    assert torch.ones(1).device.type == "cpu"
"""


def outcomes(folder: Path, **environment: str) -> dict[str, str]:
    """Run the planted tests under this project's conftest; give outcome by name."""
    file = folder / "test_planted.py"
    file.write_text(PLANTED)
    root = Path(__file__).resolve().parent.parent
    options = ["-p", "tests.conftest", "-p", "no:cacheprovider", "-v"]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *options, f"--rootdir={folder}", str(file)],
        cwd=root,
        env={
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": os.pathsep.join(
                [str(root), os.environ.get("PYTHONPATH", "")]
            ),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    found: dict[str, str] = {}
    for line in result.stdout.splitlines():
        name, _, outcome = line.partition("::")[2].partition(" ")
        if outcome.split() and outcome.split()[0].isupper():
            # An error in the teardown comes after the outcome of the call.
            found[name] = outcome.split()[0]
    assert found, result.stdout + result.stderr
    return found


def test_leaks_fail_the_test_that_made_them(tmp_path: Path) -> None:
    found = outcomes(tmp_path, GPUPREFETCH_REQUIRE_CUDA="")
    assert found == {
        "test_leaks_a_thread": "ERROR",
        "test_leaks_a_process": "ERROR",
        "test_leaves_nothing": "PASSED",
        "test_starts_from_the_same_random_state[1]": "PASSED",
        "test_starts_from_the_same_random_state[2]": "PASSED",
        "test_needs_a_device[cpu]": "PASSED",
        "test_needs_a_device[cuda]": "SKIPPED",
    }


def test_a_skip_is_a_failure_where_cuda_is_required(tmp_path: Path) -> None:
    found = outcomes(tmp_path, GPUPREFETCH_REQUIRE_CUDA="1")
    assert found["test_needs_a_device[cpu]"] == "PASSED"
    assert found["test_needs_a_device[cuda]"] in ("ERROR", "FAILED")
