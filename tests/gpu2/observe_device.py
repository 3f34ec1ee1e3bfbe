"""Which GPUs does a process touch that is to work on the second one?

    python -m tests.gpu2.observe_device HOW

Prints what it saw as one line of JSON. HOW says how the second GPU is chosen: by its
name, by the current device, or by default; ``touch-first`` also works on the first one,
so that it is known that touching it would be seen.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import kornia.augmentation as K
import torch
from torch.utils.data import DataLoader

from gpuprefetch import StreamPrefetchLoader
from tests.sources import Images

WAYS: dict[str, str | None] = {
    "named": "cuda:1",
    "current": "cuda",
    "by-default": None,
    "touch-first": "cuda",
}


def pids_on(gpu: int) -> list[int]:
    """Ask nvidia-smi which processes have something on a GPU.

    In some containers it shows none, or the numbers that they have outside.
    """
    query = ["--query-compute-apps=pid", "--format=csv,noheader", f"--id={gpu}"]
    listed = subprocess.run(
        ["nvidia-smi", *query], capture_output=True, text=True, check=True, timeout=60
    )
    return [int(line) for line in listed.stdout.split() if line.isdecimal()]


def sources(how: str) -> dict[str, Callable[[], Any]]:
    """Name sources over the same images; torch's own pinning needs a current device."""
    pinning = {"pin_memory": True} if how != "named" else {}
    return {
        "inline": lambda: DataLoader(Images(8), batch_size=4),
        "workers": lambda: DataLoader(Images(8), batch_size=4, num_workers=1),
        "pinned": lambda: DataLoader(Images(8), batch_size=4, num_workers=1, **pinning),
    }


def read(source: Any, transform: Any, device: str | None) -> tuple[set[str], int]:
    """Give the devices of all tensors, and how many images were right."""
    devices, num_right = set(), 0
    with StreamPrefetchLoader(source, transform, device=device, seed=0) as loader:
        for images, labels in loader:
            devices |= {str(images.device), str(labels.device)}
            expected = torch.stack([Images(8)[int(label)][0] for label in labels])
            num_right += int((images.cpu() == expected).all(dim=(1, 2, 3)).sum())
    return devices, num_right


def observe(how: str) -> dict[str, Any]:
    """Read through every kind of source and transform, then look around."""
    device, devices, num_right, num_read = WAYS[how], set(), 0, 0
    if how != "named":
        torch.cuda.set_device(1)
    current_before = torch.cuda.current_device()
    for build in sources(how).values():
        # Without a transform pixels are compared; Kornia's fused kernel runs too.
        for transform in (None, K.RandomRotation(30.0, p=1.0)):
            seen, right = read(build(), transform, device)
            devices |= seen
            num_right += right if transform is None else 0
            num_read += 8 if transform is None else 0
    if how == "touch-first":
        torch.zeros(1, device="cuda:0")
    torch.cuda.synchronize(1)
    return {
        "devices": sorted(devices),
        "num_right": num_right,
        "num_read": num_read,
        "current": [current_before, torch.cuda.current_device()],
        "reserved_on_first": torch.cuda.memory_reserved(0),
        "has_context_on_first": bool(torch._C._cuda_hasPrimaryContext(0)),
        "listed_on_first": os.getpid() in pids_on(0),
        "listed_on_second": os.getpid() in pids_on(1),
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(observe(sys.argv[1])) + "\n")
