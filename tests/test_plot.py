"""Does ``python -m gpuprefetch plot`` draw a trace, and fail in one line?"""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from gpuprefetch import timeline
from gpuprefetch.cli.app import main
from gpuprefetch.errors import DependencyError, SettingError
from gpuprefetch.overlap import find_overlap
from gpuprefetch.timeline import save_timeline
from gpuprefetch.trace import HostRange, read_trace
from tests.synthetic_trace import AUTOGRAD, Loop, write_trace

ROOT = Path(__file__).resolve().parent.parent


def run_plot(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gpuprefetch", "plot", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def texts_of(figure: Any) -> list[str]:
    """All that a reader can read in a figure."""
    found = [figure.get_suptitle()]
    for panel in figure.axes:
        found += [text.get_text() for text in panel.texts]
        found += [label.get_text() for label in panel.get_yticklabels()]
        found += [panel.get_xlabel(), panel.get_title(loc="left")]
    for legend in figure.legends:
        found += [text.get_text() for text in legend.get_texts()]
    return [text for text in found if text]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Figures that were drawn, instead of files."""
    figures: list[Any] = []
    monkeypatch.setattr(timeline, "save_figure", lambda f, *_, **__: figures.append(f))
    return figures


def draw(loop: Loop, folder: Path, **settings: Any) -> None:
    trace = read_trace(write_trace(folder / "t.json", loop.build()))
    save_timeline(trace, find_overlap(trace), folder / "t.png", **settings)


# The command #


def test_the_command_draws_and_tells(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.json.gz", Loop().build())
    picture = tmp_path / "timeline.png"
    done = run_plot(str(trace), "--out", str(picture))
    assert (done.returncode, done.stderr) == (0, "")
    assert "training steps   12, one every 4.8" in done.stdout
    assert "11 of 11 were made ready within the step of an earlier one" in done.stdout
    assert "batches on stream 20, training on stream 7" in done.stdout
    assert str(picture) in done.stdout
    image = Image.open(picture)
    assert image.width > 1000
    assert len(image.convert("RGB").getcolors(1 << 24)) > 50


def test_the_command_tells_that_a_plain_loop_hides_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write_trace(tmp_path / "trace.json", Loop(is_plain=True).build())
    out = tmp_path / "picture.svg"
    assert main(["plot", str(trace), f"--out={out}"]) == 0
    shown = capsys.readouterr().out
    assert "copies           121 us a batch, 0% of it" in shown
    assert "augmentation     36 us a batch, 0% of it" in shown
    assert "0 of 11 were made ready within" in shown
    assert "all of it on stream 7, one after the other" in shown
    assert out.read_text().startswith("<?xml")


def test_a_file_that_is_no_trace_ends_in_one_line_and_code_2(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a trace\nat all")
    done = run_plot(str(path))
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"python -m gpuprefetch plot: error: {path} is not a trace")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.json"], "cannot use missing.json: No such file"),
        (["."], "Is a directory"),
        (["TRACE", "--first=12"], "12 steps, counted from 0; there is no step 12"),
        (["TRACE", "--out=a.docx"], "cannot be written as '.docx'"),
        (["TRACE", "--out=/no/such/folder/a.png"], "No such file or directory"),
    ],
)
def test_what_cannot_be_drawn_ends_in_one_line_and_code_2(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    trace = str(write_trace(tmp_path / "trace.json", Loop().build()))
    given = [trace if word == "TRACE" else word for word in arguments]
    assert main(["plot", *given]) == 2
    shown = capsys.readouterr()
    (line,) = shown.err.splitlines()
    assert message in line
    assert shown.out == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: TRACE"),
        (["t.json", "--steps=0"], "--steps: must be a whole number of at least 1"),
        (["t.json", "--first=-1"], "--first: must be a whole number of at least 0"),
        (["t.json", "--depth=none"], "at least 1, got 'none'"),
    ],
)
def test_a_wrong_argument_ends_in_one_line_and_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plot", *arguments])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_help_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plot", "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "python -m gpuprefetch plot trace.json --out timeline.png" in shown
    assert "profiler.step()" in shown
    assert max(map(len, shown.splitlines())) <= 88


def test_matplotlib_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(DependencyError, match=r"pip install 'gpuprefetch-torch\[plot"):
        draw(Loop(), tmp_path)


# The picture #


def test_the_backward_pass_is_told_by_what_it_runs(
    tmp_path: Path, drawn: list[Any]
) -> None:
    """Not by its thread's name: some systems give all threads that of the program."""
    trace = read_trace(write_trace(tmp_path / "t.json", Loop().build()))
    operation = HostRange(
        "autograd::engine::evaluate_function: MmBackward0",
        start_us=0.0,
        duration_us=9.0,
        kind="operation",
        thread=AUTOGRAD,
    )
    trace = replace(
        trace,
        ranges=(operation, *trace.ranges),
        thread_names=dict.fromkeys(trace.thread_names, "thread (python3)"),
    )
    save_timeline(trace, find_overlap(trace), tmp_path / "t.png")
    rows = [label.get_text() for label in drawn[0].axes[0].get_yticklabels()]
    assert rows[:2] == ["CPU: your loop", "CPU: backward pass"]


def test_a_batch_has_one_colour_in_every_row(tmp_path: Path, drawn: list[Any]) -> None:
    draw(Loop(is_fresh=True), tmp_path, num_steps=3, first_step=0)
    (figure,) = drawn
    overview = figure.axes[0]
    rows = [label.get_text() for label in overview.get_yticklabels()]
    assert rows == [
        "CPU: your loop",
        "CPU: backward pass",
        "CPU: feeder",
        "GPU: side stream",
        "GPU: your stream",
    ]
    colours: dict[int, list[tuple[float, ...]]] = {}
    for bar in overview.patches:
        row = round(bar.get_y() + bar.get_height() / 2)
        colour = bar.get_facecolor()[:3]
        if row >= 3 and colour not in colours.setdefault(row, []):
            colours[row].append(colour)
    on_side, on_consumer = colours[3], colours[4]
    assert on_consumer == on_side[: len(on_consumer)]
    assert len(set(on_consumer)) == 4  # Three steps, and the begin of the next.


def test_a_picture_says_what_it_shows(tmp_path: Path, drawn: list[Any]) -> None:
    draw(Loop(), tmp_path, num_steps=2, first_step=4)
    texts = texts_of(drawn[0])
    assert "step on batch 4" in texts
    assert "step on batch 5" in texts
    assert "step on batch 6" not in texts
    assert "milliseconds" in texts
    assert {"copy to the GPU", "augmentation", "training step"} <= set(texts)
    assert any("while the GPU trains (9" in text for text in texts)
    # Copies of 0.16 ms in steps of 5 ms need a closer look.
    assert any("A closer look at the grey part: batch 9" in text for text in texts)


def test_a_plain_loop_is_drawn_without_a_side_stream(
    tmp_path: Path, drawn: list[Any]
) -> None:
    draw(Loop(is_plain=True), tmp_path)
    texts = texts_of(drawn[0])
    assert "GPU: side stream" not in texts
    assert "Copy, augmentation and training take turns: nothing is hidden" in texts


def test_large_batches_need_no_closer_look(tmp_path: Path, drawn: list[Any]) -> None:
    draw(Loop(copies_us=(3000.0,)), tmp_path, num_steps=2)
    assert len(drawn[0].axes) == 1


def test_few_steps_are_all_shown(tmp_path: Path, drawn: list[Any]) -> None:
    draw(Loop(num_steps=2), tmp_path, num_steps=50)
    assert {"step on batch 0", "step on batch 1"} <= set(texts_of(drawn[0]))


def test_a_step_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="has 3 steps, counted from 0"):
        draw(Loop(num_steps=3), tmp_path, first_step=3)
