"""Does the command line do what its help says, and fail in one line?"""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from gpuprefetch.cli import bar, comparison, demo
from gpuprefetch.cli.app import main
from gpuprefetch.cli.comparison import default_sizes
from gpuprefetch.cli.table import format_table

ROOT = Path(__file__).resolve().parent.parent
SMALL = ["--device=cpu", "--image-size=16", "--batch-size=2", "--batches=2"]
COMPARED = ["(a) plain loop", "(b) plain loop", "(c) StreamPrefetchLoader"]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    # Small work: where other processes use the cores, a second thread costs seconds.
    torch.set_num_threads(1)


def _is_blank(path: Path) -> bool:
    return len(Image.open(path).convert("L").getcolors()) < 100


# Runs #


def test_the_demo_prints_its_table_and_draws_its_picture(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gpuprefetch", "demo", *SMALL]
    done = subprocess.run(
        [*command, "--workers=1", f"--out={tmp_path / 'new' / 'folder'}"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    (bound,) = (line for line in lines if line.startswith("training step alone"))
    assert bound.split()[-2:] == ["100%", "-"]  # Its loss would mean nothing.
    for pipeline in COMPARED:
        (row,) = (line for line in lines if line.startswith(pipeline))
        assert "->" in row
    assert done.stderr == ""  # No frames of a bar where nobody looks.
    assert "nan" not in done.stdout
    assert "No overlap is to be expected here" in done.stdout
    picture = tmp_path / "new" / "folder" / "augmentations.png"
    assert str(picture) in done.stdout
    assert not _is_blank(picture)


def test_the_demo_works_without_workers_and_without_tqdm(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert main(["demo", *SMALL, "--workers=0", f"--out={tmp_path}"]) == 0
    shown = capsys.readouterr()
    assert "(c) StreamPrefetchLoader" in shown.out
    assert shown.err == ""
    assert not _is_blank(tmp_path / "augmentations.png")


# Mistakes #


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: COMMAND"),
        (["nope"], "invalid choice: 'nope'"),
        (["demo", "--batch-size=0"], "--batch-size: must be a whole number of at"),
        (["demo", "--batches=many"], "at least 1, got 'many'"),
        (["demo", "--image-size=15"], "at least 16, got '15'"),
        (["demo", "--workers=-1"], "at least 0, got '-1'"),
        (["demo", "--device=toaster"], "cannot train on 'toaster'"),
        (["demo", "--device=cuda:99"], "cannot train on 'cuda:99'"),
        (["demo", "--device=meta"], "cannot train on 'meta'"),
        (["demo", "--colour"], "unrecognized arguments: --colour"),
    ],
)
def test_a_wrong_argument_ends_in_one_line_and_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    shown = capsys.readouterr()
    assert ended.value.code == 2
    assert shown.out == ""
    (line,) = shown.err.splitlines()
    assert line.startswith("python -m gpuprefetch")
    assert message in line
    assert "--help" in line


def test_a_folder_that_cannot_be_made_ends_in_one_line_and_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("in the way")
    assert main(["demo", f"--out={occupied}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("python -m gpuprefetch demo: error:")
    assert "file" in line


@pytest.mark.parametrize("module", ["matplotlib.figure", "skimage.data"])
def test_a_missing_package_is_named_before_anything_is_trained(
    module: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    if module == "skimage.data":
        monkeypatch.setitem(sys.modules, "skimage", None)
    assert main(["demo", *SMALL, f"--out={tmp_path}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "pip install 'gpuprefetch-torch[" in line


def test_ctrl_c_ends_in_one_line_and_code_130(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "compare", interrupted)
    assert main(["demo", *SMALL, f"--out={tmp_path}"]) == 130
    assert capsys.readouterr().err == "python -m gpuprefetch: interrupted\n"


def test_help_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["demo", "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: python -m gpuprefetch demo [-h]")
    assert "python -m gpuprefetch demo --device cuda:1" in shown
    assert max(map(len, shown.splitlines())) <= 88


# Parts #


@pytest.mark.parametrize(
    ("device", "num_cores", "expected"),
    [
        ("cpu", 1, (16, 64, 10, 1)),
        ("cpu", 2, (16, 64, 10, 1)),
        ("cpu", 16, (16, 128, 16, 8)),
        ("cuda", 4, (32, 256, 80, 3)),
        ("cuda", 16, (32, 256, 80, 8)),
    ],
)
def test_sizes_adapt_to_the_machine(
    device: str,
    num_cores: int,
    expected: tuple[int, int, int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(comparison, "count_cores", lambda: num_cores)
    sizes = default_sizes(torch.device(device))
    assert expected == (
        sizes.batch_size,
        sizes.image_size,
        sizes.num_batches,
        sizes.num_workers,
    )


def test_a_table_lines_up_its_columns() -> None:
    assert format_table(["name", "n"], [["a", "100"], ["longer", "7"]]) == (
        "name      n\n------  ---\na       100\nlonger    7"
    )


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("has_tqdm", [False, True])
def test_a_bar_is_drawn_on_a_terminal_only(
    has_tqdm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_tqdm:
        monkeypatch.setitem(sys.modules, "tqdm", None)
    for stream, is_drawn in ((_Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stderr", stream)
        with bar.progress_bar("work", total=3, unit="batches") as shown:
            shown.update(3)
        assert ("3/3" in stream.getvalue()) is is_drawn


def test_the_plain_bar_ends_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = _Terminal()
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(sys, "stderr", stream)
    with bar.progress_bar("work", total=3, unit="batches") as shown:
        for _ in range(3):
            shown.update(1)
    drawn = stream.getvalue().split("\r")
    assert drawn[1].endswith("[..............................] 0/3 batches")
    assert drawn[-1].endswith("[##############################] 3/3 batches\n")
