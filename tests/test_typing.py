"""Does the type of the user's batches survive the loader, for a strict type checker?"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

_HERE = Path(__file__).parent
_ROOT = _HERE.parent

pytestmark = pytest.mark.timeout(300)


def check(*files: Path) -> str:
    """Run mypy as the project is checked, with its cache, and give its output."""
    command = [sys.executable, "-m", "mypy", "--strict", *map(str, files)]
    result = subprocess.run(
        command, cwd=_ROOT, capture_output=True, text=True, timeout=280, check=False
    )
    assert not result.stderr.strip(), result.stderr
    return result.stdout


def test_the_batch_type_is_what_the_loader_yields() -> None:
    assert "Success" in check(_HERE / "typing" / "right.py")


def test_meta_each_wrong_line_is_refused_and_no_other() -> None:
    file = _HERE / "typing" / "wrong.py"
    marked = {
        number
        for number, line in enumerate(file.read_text().splitlines(), start=1)
        if line.endswith("# error")
    }
    output = check(file)
    refused = {int(n) for n in re.findall(r"wrong\.py:(\d+): error", output)}
    assert refused == marked, output
