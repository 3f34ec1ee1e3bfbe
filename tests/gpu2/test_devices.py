"""Does a loader on the second GPU leave the first one alone? Do two keep apart?"""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import kornia.augmentation as K
import pytest
import torch
from torch import nn

from gpuprefetch import StreamPrefetchLoader

_ROOT = Path(__file__).resolve().parent.parent.parent


@cache
def observed(how: str) -> dict[str, Any]:
    """Run ``observe_device`` in a process of its own: contexts last for its life."""
    finished = subprocess.run(
        [sys.executable, "-m", "tests.gpu2.observe_device", how],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    seen: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return seen


every_way = pytest.mark.parametrize("how", ["named", "current", "by-default"])


@every_way
def test_all_outputs_are_on_the_second_gpu_and_right(how: str) -> None:
    assert observed(how)["devices"] == ["cuda:1"]
    assert observed(how)["num_right"] == observed(how)["num_read"] == 24


@every_way
def test_the_current_device_is_left_as_it_was(how: str) -> None:
    assert observed(how)["current"] == ([0, 0] if how == "named" else [1, 1])


@every_way
def test_no_memory_is_reserved_on_the_first_gpu(how: str) -> None:
    assert observed(how)["reserved_on_first"] == 0


@every_way
def test_no_context_is_opened_on_the_first_gpu(how: str) -> None:
    assert not observed(how)["has_context_on_first"]
    assert not observed(how)["listed_on_first"]


def test_meta_touching_the_first_gpu_is_seen() -> None:
    seen = observed("touch-first")
    assert seen["reserved_on_first"] > 0
    assert seen["has_context_on_first"]
    # Where nvidia-smi shows this process at all, it shows it on both.
    assert seen["listed_on_first"] == seen["listed_on_second"]


# Two loaders, two devices, one process #


def _batches(start: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(start)
    return [
        (
            torch.randint(
                0, 256, (8, 3, 64, 64), dtype=torch.uint8, generator=generator
            ),
            torch.full((8,), start + number),
        )
        for number in range(60)
    ]


def _loader(source: Any, device: str, transform: nn.Module | None) -> Any:
    return StreamPrefetchLoader(source, transform, device=device, seed=3)


@pytest.mark.parametrize("is_augmented", [False, True])
@pytest.mark.parametrize("background", [False, True])
def test_two_loaders_on_two_devices_take_turns(
    background: bool, is_augmented: bool
) -> None:
    """Each gives what it gives alone; without a transform, what its source holds."""
    chain = nn.Sequential(K.RandomCrop((32, 32), p=1.0), K.RandomRotation(45.0, p=1.0))
    transform = chain if is_augmented else None
    bank = [_batches(0), _batches(1000)]
    alone = [
        [
            images.cpu()
            for images, _ in _loader(bank[number], f"cuda:{number}", transform)
        ]
        for number in (0, 1)
    ]
    loaders = [
        StreamPrefetchLoader(
            bank[number],
            transform,
            device=f"cuda:{number}",
            seed=3,
            background=background,
        )
        for number in (0, 1)
    ]
    passes = [iter(loader) for loader in loaders]
    for index in range(60):
        for number in (0, 1):
            images, labels = next(passes[number])
            assert images.device == labels.device == torch.device("cuda", number)
            assert torch.equal(labels.cpu(), bank[number][index][1])
            assert torch.equal(images.cpu(), alone[number][index])
            if not is_augmented:
                assert torch.equal(images.cpu(), bank[number][index][0])
            assert torch.cuda.current_device() == 0
    for loader in loaders:
        loader.close()
