"""Does the documentation still describe this code?

Every Python block of the README and of ``docs/`` runs, each on its own, with the names
of ``_prelude`` at hand. Links lead somewhere; the table of settings is the signature.
"""

import copy
import inspect
import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import kornia.augmentation as K
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from gpuprefetch import StreamPrefetchLoader

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
# These run other libraries, which may warn of what they like.
_OF_FRAMEWORKS = {"accelerate", "fabric", "hf_trainer", "lightning", "timm"}
EXAMPLES = [
    pytest.param(
        path,
        id=path.name,
        marks=(
            pytest.mark.filterwarnings("default")
            if path.stem.removeprefix("train_") in _OF_FRAMEWORKS
            else ()
        ),
    )
    for path in sorted(ROOT.glob("examples/*.py"))
]


def _blocks() -> list[Any]:
    """Find the Python blocks, each with the page and line that it starts on."""
    found = []
    for page in PAGES:
        text = page.read_text()
        for block in re.finditer(
            r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL
        ):
            line = text[: block.start()].count("\n") + 2
            needs_gpu = block[1].startswith("# needs a GPU")
            found.append(
                pytest.param(
                    "\n" * (line - 1) + block[1],
                    page,
                    id=f"{page.name}:{line}",
                    marks=[pytest.mark.gpu] if needs_gpu else [],
                )
            )
    return found


class _Logger:
    """Takes numbers as TensorBoard, Weights & Biases and Prometheus do."""

    def __init__(self) -> None:
        self.numbers: dict[str, float] = {}

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.numbers[tag] = float(scalar_value)

    def log(self, data: dict[str, float], step: int) -> None:
        self.numbers.update((tag, float(value)) for tag, value in data.items())

    def labels(self, name: str) -> "_Logger":
        return self

    def set(self, value: float) -> None:
        self.numbers["gauge"] = float(value)


def _prelude() -> dict[str, Any]:
    """What the blocks may take for granted."""
    images = torch.randint(0, 256, (8, 3, 32, 32), dtype=torch.uint8)
    masks = torch.randint(0, 3, (8, 1, 32, 32))
    with_masks = [
        {"image": image, "mask": mask, "name": "a"}
        for image, mask in zip(images, masks, strict=True)
    ]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, 4))
    model.to(device)
    encoder = nn.Conv2d(3, 4, 3).to(device)
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4))
    dataset = list(zip(images, torch.arange(8) % 4, strict=True))
    return {
        "DataLoader": DataLoader,
        "K": K,
        "StreamPrefetchLoader": StreamPrefetchLoader,
        "augment": K.RandomRotation(45.0, p=1.0),
        "criterion": nn.CrossEntropyLoss(),
        "dataset": dataset,
        "encoder": encoder,
        "gauge": _Logger(),
        "head": head.to(device),
        "loader": DataLoader(dataset, 2),
        "model": model,
        "nn": nn,
        "os": os,
        "run": _Logger(),
        "writer": _Logger(),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "segmentation_loader": DataLoader(with_masks, 2),
        "teacher": copy.deepcopy(model),
        "torch": torch,
    }


def test_the_pages_import_public_modules_only() -> None:
    text = "".join(page.read_text() for page in PAGES)
    imported = re.findall(r"^ *from gpuprefetch\.([\w.]+) import", text, re.MULTILINE)
    assert len(imported) > 5
    (listed,) = re.findall(r"`__all__` of the modules\n(.*?)\. All", text, re.DOTALL)
    assert set(imported) <= set(re.findall(r"`([\w.]+)`", listed))


# Torch's profiler says that of itself, where there is a GPU.
@pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")
@pytest.mark.parametrize(("code", "page"), _blocks())
def test_a_python_block_runs(
    code: str, page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # Some write a file.
    exec(compile(code, page, "exec"), _prelude())


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_runs(
    example: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(sys, "argv", [str(example)])
    runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        linked = page.parent / name if name else page
        assert linked.exists(), target
        if anchor:
            assert anchor in _anchors(linked), target


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {
        re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-")
        for heading in headings
    }


def _map_of(folder: str) -> list[str]:
    """Read which files the contributor's map of a folder names."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = text.partition(f"| in `{folder}` | files |\n")[2].partition("\n\n")[0]
    assert table, folder
    cells = "".join(line.split("|")[2] for line in table.splitlines()[1:])
    return sorted(re.findall(r"`([^`]+)`", cells))


def _files_of(folder: Path) -> list[str]:
    return [path.stem for path in folder.glob("*.py")]


def test_the_contributors_map_names_every_file_once() -> None:
    package = ROOT / "gpuprefetch"
    frameworks = set(_files_of(package / "integrations")) - {"__init__"}
    folders = ["cli/", "integrations/", *frameworks]
    assert _map_of("gpuprefetch/") == sorted(_files_of(package) + folders)
    augment = package / "augment"
    sources = [path.name for path in augment.glob("*.cu")]
    assert _map_of("gpuprefetch/augment/") == sorted(_files_of(augment) + sources)


def test_commands_of_the_pages_are_targets_and_the_test_named_there_is_one() -> None:
    targets = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.M)
    text = "".join(page.read_text() for page in PAGES)
    commands = set(re.findall(r"(?:`|^)make ([a-z0-9-]+)", text, re.M))
    assert "gpu2" in commands
    assert commands <= set(targets)
    named = re.findall(r"(tests/\w+\.py)::(\w+)", text)
    assert named
    for file, test in named:
        assert f"def {test}(" in (ROOT / file).read_text()


def test_the_table_of_settings_is_the_signature() -> None:
    rows = re.findall(
        r"^\| `(\w+)` +\| +(?:`(\w+)`)? +\|", PAGES[0].read_text(), re.MULTILINE
    )
    parameters = inspect.signature(StreamPrefetchLoader).parameters.values()
    assert rows == [
        (
            parameter.name,
            "" if parameter.default is parameter.empty else str(parameter.default),
        )
        for parameter in parameters
    ]


def test_the_readme_starts_with_the_change_to_the_loop() -> None:
    readme = PAGES[0].read_text()
    assert readme.index("```diff") < readme.index("## Numbers")
    assert readme.index("## Numbers") < readme.index("## When this will not help")
    assert readme.index("## When this will not help") < readme.index("## Install")
