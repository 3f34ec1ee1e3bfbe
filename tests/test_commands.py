"""Do the commands ``probe``, ``show`` and ``bench`` do what their help says?

The real commands run in processes of their own, in a folder with a user's files.
"""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from gpuprefetch.cli.app import main
from gpuprefetch.plural import counted

pytestmark = pytest.mark.timeout(110)

ROOT = Path(__file__).resolve().parent.parent

TRAIN = """\
import kornia.augmentation as K
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)


class Noise(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        return torch.full((3, 16, 16), index, dtype=torch.uint8), index % 4


def make_loader():
    return DataLoader(Noise(), 4)


loader = make_loader()
model = nn.Sequential(nn.Flatten(), nn.Linear(768, 4))


def step(images, labels):
    nn.functional.cross_entropy(model(images.float()), labels).backward()


def step_of_batch(batch):
    step(*batch)


class Step:
    def __call__(self, batch):
        step(*batch)


def broken_step(batch):
    return batch.nope


def broken_transform(images):
    raise ValueError("no such images")


def flat(images):
    return images.flatten(1)


def step_of_nothing():
    pass


def step_by_name(*, batch):
    pass


def step_of_three(x, y, z):
    pass


def stop(batch):
    raise StopIteration


def leave(batch):
    raise SystemExit(0)


def make_dicts():
    return [{"x": 1, "y": 2}] * 20


def talking_step(batch):
    print("loss", 3.0)


def pairs(images):
    return images[:, :2]


def first(images):
    return images[:1]


def nothing(images):
    return images[:, :, :0]


def float_step(images, labels):
    model(images)


def make_loader_of(batch_size):
    return DataLoader(Noise(), batch_size)


def make_augment():
    return augment


def as_floats(images):
    return images.float()


number = 3
augment = nn.Sequential(K.RandomRotation(30.0, p=1.0), K.RandomHorizontalFlip(p=1.0))
normalize = K.Normalize(0.5, 0.1)
with_labels = K.AugmentationSequential(
    K.RandomHorizontalFlip(p=1.0), data_keys=["input", "bbox_xyxy", "keypoints", "mask"]
)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder: a training script, a picture, labels, and some mistakes."""
    path = tmp_path_factory.mktemp("user")
    (path / "train.py").write_text(TRAIN)
    (path / "fails.py").write_text("import torch\n1 / 0\n")
    (path / "needs.py").write_text("import a_package_that_is_not_there\n")
    (path / "leaves.py").write_text("import sys\nsys.exit(0)\n")
    (path / "wrong.py").write_text("x = 1\ndef f(:\n")
    pixels = np.zeros((40, 60, 3), dtype=np.uint8)
    pixels[:, :30] = (200, 40, 40)
    Image.fromarray(pixels).save(path / "two.png")
    mask = np.zeros((40, 60), dtype=np.uint8)
    mask[10:30, 5:25] = 1
    Image.fromarray(mask).save(path / "mask.png")
    entry = {"boxes": [[5, 10, 24, 29]], "keypoints": [[15, 20]], "mask": "mask.png"}
    (path / "labels.json").write_text(json.dumps({"two.png": entry}))
    (path / "name.json").write_text('{"two.png": {"mask": 5}}')
    Image.fromarray(np.full((40, 60), 300, dtype=np.uint16)).save(path / "deep.png")
    (path / "deep.json").write_text('{"two.png": {"mask": "deep.png"}}')
    (path / "text.json").write_text("not json")
    (path / "list.json").write_text("[1]")
    (path / "odd.json").write_text('{"two.png": {"colour": 1}}')
    (path / "short.json").write_text('{"two.png": {"boxes": [[1, 2, 3]]}}')
    (path / "text.png").write_text("not a picture")
    return path


def run(folder: Path, *arguments: str) -> tuple[int, str, str]:
    """Run a command as a user does."""
    return run_python(folder, "-m", "gpuprefetch", *arguments)


def run_python(folder: Path, *arguments: str) -> tuple[int, str, str]:
    """Run Python in a process of its own, as in the user's folder."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


QUICK = ("--device=cpu", "--batches=8", "--rounds=2")


# probe #


def test_the_probe_prints_its_measurements_and_an_answer(folder: Path) -> None:
    code, out, err = run(
        folder, "probe", "train:make_loader", "--step=train:step",
        "--transform=train:augment", *QUICK,
    )  # fmt: skip
    assert (code, err) == (0, "")
    for name in ("loader", "step", "transform"):
        assert re.search(rf"^{name} alone +\d+\.\d\d +\d+\.\d$", out, re.MULTILINE)
    assert re.search(r"^plain loop +\d", out, re.MULTILINE)
    assert re.search(r"^with StreamPrefetchLoader +\d", out, re.MULTILINE)
    expected = r"^expected: (nothing from overlap|too noisy to say): "
    assert re.search(expected, out, re.MULTILINE)
    assert re.search(
        r"^measured: \d+\.\d\d x as fast, \d+\.\d\d to \d+\.\d\d with 50% confidence$",
        out,
        re.MULTILINE,
    )
    assert re.search(r"^answer:   Cannot tell from 2 rounds: ", out, re.MULTILINE)
    assert re.search(r"^verdict:  [a-z]+-bound", out, re.MULTILINE)


def test_the_probe_gives_json_for_a_program(folder: Path) -> None:
    code, out, err = run(
        folder, "probe", "train.py:loader", "--step=train.py:step_of_batch",
        "--json", *QUICK,
    )  # fmt: skip
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert result["transform_ms"] is None
    assert result["batches"] == 8
    assert result["gain"]["low"] <= result["gain"]["median"] <= result["gain"]["high"]


def test_what_a_step_prints_does_not_get_into_the_json(folder: Path) -> None:
    code, out, err = run(
        folder, "probe", "train:loader", "--step=train:talking_step", "--json", *QUICK
    )
    assert code == 0
    assert json.loads(out)["batches"] == 8
    assert set(err.splitlines()) == {"loss 3.0"}


def test_a_file_is_run_once_whatever_is_taken_from_it(folder: Path) -> None:
    from gpuprefetch.cli.objects import load_loader, load_step

    file = str(folder / "train.py")
    loader: Any = load_loader(f"{file}:loader")
    step: Any = load_step(f"{file}:step_of_batch")
    assert step.__globals__["loader"] is loader


@pytest.mark.parametrize(
    "step", ["train:step", "train:step_of_batch", "train:Step", "train:Step.__call__"]
)
def test_a_step_takes_a_batch_or_its_items(
    folder: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpuprefetch.cli.objects import load_loader, load_step

    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    (batch, *_) = load_loader("train:make_loader")
    if step.endswith("__call__"):  # self, batch: as many as the batch has items.
        with pytest.raises(TypeError):
            load_step(step)(batch)
    else:
        load_step(step)(batch)


@pytest.mark.parametrize(
    ("words", "inputs"),
    [
        (None, None),
        ("image", "image"),
        ("1", 1),
        ("-1", -1),
        ("image,mask", ("image", "mask")),
        ("0,1", (0, 1)),
    ],
)
def test_inputs_are_read_as_keys_or_indices(words: str | None, inputs: object) -> None:
    from gpuprefetch.cli.probe import parse_inputs

    assert parse_inputs(words) == inputs


# bench #


def test_the_benchmark_runs_without_any_data(folder: Path) -> None:
    code, out, err = run(
        folder, "bench", "--device=cpu", "--batches=2", "--rounds=1", "--json"
    )
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert result["transform_ms"] > 0
    assert result["ours_ms"] > 0


# show #


def test_a_picture_shows_the_samples_and_their_labels(folder: Path) -> None:
    code, out, err = run(
        folder, "show", "train:with_labels", "two.png", "--labels=labels.json",
        "--samples=2", "--out=grid.png", "--device=cpu",
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert out == "1 image, 2 samples each: grid.png\n"
    pixels = np.asarray(Image.open(folder / "grid.png").convert("RGB")).astype(int)
    green = (pixels[..., 1] > 200) & (pixels[..., 0] < 90) & (pixels[..., 2] < 90)
    cyan = (pixels[..., 1] > 200) & (pixels[..., 2] > 200) & (pixels[..., 0] < 90)
    assert green.any()
    assert cyan.any()
    # The flip took the box from the left half of the picture to the right one.
    thirds = np.array_split(np.arange(pixels.shape[1]), 3)
    for place, third in enumerate(thirds):
        columns = np.nonzero(green[:, third].any(0))[0] / len(third)
        assert bool(columns.mean() < 0.5) is (place == 0)


def test_a_normalized_image_is_stretched_so_that_it_can_be_seen(folder: Path) -> None:
    code, _, err = run(
        folder, "show", "train.py:normalize", "two.png", "--samples=1",
        "--out=normalized.png", "--device=cpu",
    )  # fmt: skip
    assert (code, err) == (0, "")
    pixels = np.asarray(Image.open(folder / "normalized.png").convert("RGB"))
    # Red is the largest value left and right of the gap.
    assert (pixels.reshape(-1, 3).astype(int) @ (1, -1, -1)).max() > 100


@pytest.mark.parametrize("depth", [np.uint16, np.int32, np.float32])
def test_a_picture_of_more_than_8_bits_is_not_clipped(
    tmp_path: Path, depth: type[np.generic]
) -> None:
    from gpuprefetch.cli.labels import read_image

    most = 1.0 if depth is np.float32 else 65535
    ramp = np.linspace(0, most, 256).astype(depth).reshape(16, 16)
    Image.fromarray(ramp).save(tmp_path / "deep.tiff")
    expected = torch.arange(256).reshape(16, 16).expand(3, 16, 16)
    pixels = read_image(tmp_path / "deep.tiff").int()
    assert (pixels - expected).abs().max() <= 1


# Mistakes #


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("probe train --step train:step", "not of the form MODULE:NAME"),
        ("probe trian:loader --step train:step", "no module 'trian'"),
        ("probe nope.py:loader --step train:step", "there is no file nope.py"),
        ("probe train:loadre --step train:step", "Did you mean 'loader'?"),
        ("probe train:number --step train:step", "train:number is a int"),
        ("probe train:Noise.__len__ --step train:step", "__len__ needs arguments: "),
        ("probe train:make_loader_of --step train:step", "argument: 'batch_size'. "),
        ("probe train:model --step train:step", "train:model is a model (Sequential)"),
        ("probe train:loader --step train:float_step", "name it with --transform"),
        (
            "probe train:loader --step train:step --transform train:make_augment",
            "train:make_augment takes no argument",
        ),
        (
            "probe train:make_dicts --step train:step --transform train:as_floats",
            "--inputs x, or --inputs x,y",
        ),
        ("probe train:loader --step train:number", "train:number is a int"),
        ("probe fails:loader --step train:step", "ZeroDivisionError: division by zero"),
        ("probe needs:loader --step train:step", "a_package_that_is_not_there"),
        ("probe train:loader --step train:broken_step", "train.py:39)"),
        ("probe train:loader --step train:step_of_nothing", "takes no argument"),
        ("probe train:loader --step train:step_by_name", "needs batch= by name"),
        ("probe train:make_dicts --step train:step", "a dict with the keys ['x', 'y']"),
        ("probe train:loader --step train:stop", "failed: StopIteration"),
        ("probe train:loader --step train:leave", "ends the program (exit code 0"),
        ("probe leaves:loader --step train:step", "leaves.py:2). Put what a script"),
        ("probe leaves.py:loader --step train:step", "ends the program (exit code 0"),
        ("probe wrong:loader --step train:step", "wrong.py:2)"),
        ("probe no.such:loader --step train:step", "there is no module 'no.such'"),
        (
            "probe train:loader --step train:step --transform train:broken_transform",
            "ValueError: no such images",
        ),
        ("probe train:loader --step train:step --inputs x", "there is no transform"),
        ("show train:augment missing.png", "there is no file missing.png"),
        ("show train:augment text.png", "text.png is no picture"),
        ("show train:flat two.png", "no batch of images"),
        ("show train:pairs two.png", "a tensor of (4, 2, 40, 60), torch.uint8"),
        ("show train:first two.png", "a tensor of (1, 3, 40, 60)"),
        ("show train:nothing two.png", "a tensor of (4, 3, 0, 60)"),
        ("show train:augment two.png --out no_suffix", "Name a file such as"),
        ("show train:with_labels two.png --labels name.json", "no name of a file"),
        ("show train:with_labels two.png --labels deep.json", "numbers up to 255"),
        ("show train:broken_transform two.png", "ValueError: no such images"),
        ("show train:augment two.png --labels labels.json", "leave the boxes where"),
        ("show train:with_labels two.png", "takes 'bbox_xyxy' with each image"),
        ("show train:augment two.png --labels text.json", "is not JSON"),
        ("show train:augment two.png --labels list.json", "holds a list"),
        ("show train:augment two.png --labels odd.json", "have ['colour']"),
        ("show train:augment two.png --labels short.json", "a list of 4 numbers"),
        ("show train:augment two.png --out no/such/folder/x.png", "no/such/folder"),
    ],
)
def test_a_mistake_ends_in_one_line_and_code_2(
    folder: Path,
    arguments: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    words = arguments.split()
    quick = ["--device=cpu"] + (["--batches=2"] if words[0] == "probe" else [])
    assert main([*words, *quick]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"python -m gpuprefetch {words[0]}: error: ")
    assert message in line


def test_an_error_in_a_library_is_placed_at_the_users_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    arguments = "probe train:loader --step train:float_step --device cpu --batches 2"
    assert main(arguments.split()) == 2
    line = capsys.readouterr().err
    assert "site-packages" not in line
    place = TRAIN.splitlines().index("    model(images)") + 1
    assert f"train.py:{place})" in line


def test_the_hint_at_a_transform_is_for_a_step_without_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    arguments = (
        "probe train:loader --step train:float_step --transform train:flat "
        "--device cpu --batches 2"
    )
    assert main(arguments.split()) == 2
    line = capsys.readouterr().err
    assert "RuntimeError" in line
    assert "--transform" not in line


def test_a_mistake_ends_the_real_command_in_one_line_too(folder: Path) -> None:
    code, out, err = run(folder, "probe", "train:nope", "--step=train:step")
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert line == "python -m gpuprefetch probe: error: train has no 'nope'."


@pytest.mark.parametrize("place", ["gpuprefetch.cli.app", "train"])
def test_ctrl_c_ends_in_one_line_and_code_130(folder: Path, place: str) -> None:
    """While the commands are imported, or the user's module is."""
    program = f"""
import runpy, sys

class Interrupts:
    def find_spec(self, name, *_):
        if name == {place!r}:
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupts())
sys.argv[1:] = ["probe", "train:loader", "--step=train:step"]
runpy.run_module("gpuprefetch", run_name="__main__", alter_sys=True)
"""
    done = run_python(folder, "-c", program)
    assert done == (130, "", "python -m gpuprefetch: interrupted\n")


@pytest.mark.parametrize("command", ["probe", "show", "bench"])
def test_help_shows_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "examples:\n  python -m gpuprefetch " + command in shown
    assert max(map(len, shown.splitlines())) <= 88


def test_version_is_that_of_the_project(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert capsys.readouterr().out == f"gpuprefetch {version}\n"


def test_the_script_finds_the_users_modules_as_python_m_does(folder: Path) -> None:
    """It is started as an installed one is: with its own folder first in the path."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, function = project["scripts"]["gpuprefetch"].partition(":")
    script = folder / "bin" / "gpuprefetch"
    script.parent.mkdir(exist_ok=True)
    script.write_text(
        f"import sys\nfrom {module} import {function}\nsys.exit({function}())\n"
    )
    code, out, err = run_python(
        folder, str(script), "probe", "train:x", "--step=train:step"
    )
    assert (code, out) == (2, "")
    assert err == "python -m gpuprefetch probe: error: train has no 'x'.\n"


@pytest.mark.parametrize(
    ("number", "noun", "said"),
    [
        (0, "worker", "0 workers"),
        (1, "worker", "1 worker"),
        (2, "image", "2 images"),
        (1, "batch", "1 batch"),
        (3, "batch", "3 batches"),
    ],
)
def test_numbers_are_said_in_plain_plurals(number: int, noun: str, said: str) -> None:
    assert counted(number, noun) == said
