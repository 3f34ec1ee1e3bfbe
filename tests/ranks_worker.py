"""What does one rank see? Run by torchrun; writes what it saw for a test to judge.

    torchrun --nproc_per_node=2 tests/ranks_worker.py --out DIR [--device cuda]

All images are the same one, so two batches differ by their augmentation alone. Each
rank writes ``rank-N.json`` and, for a later run, the loader's state in mid-epoch.
"""

import argparse
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import kornia.augmentation as K
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from gpuprefetch import GpuPrefetchError, StreamPrefetchLoader

NUM_ITEMS = 26  # No multiple of 4: some rank gets an item twice.
BATCH_SIZE = 2
NUM_EPOCHS = 2
SAVED_AFTER = 2  # Batches of epoch 1.


class SameImage(Dataset[tuple[torch.Tensor, int]]):
    """Item i is one and the same image, and i."""

    def __len__(self) -> int:
        return NUM_ITEMS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        pixels = torch.arange(3 * 24 * 24, dtype=torch.uint8)
        return pixels.reshape(3, 24, 24), index


def build_loader(
    device: str | None, *, seed: int | None, num_workers: int = 0
) -> StreamPrefetchLoader[Any]:
    source = DataLoader(
        SameImage(),
        BATCH_SIZE,
        num_workers=num_workers,
        # Known without a process group, so that one may be set up later.
        sampler=DistributedSampler(
            SameImage(),
            num_replicas=int(os.environ["WORLD_SIZE"]),
            rank=int(os.environ["RANK"]),
            seed=5,
        ),
    )
    augment = K.RandomRotation(90.0, p=1.0)
    return StreamPrefetchLoader(source, transform=augment, device=device, seed=seed)


def digest(pixels: torch.Tensor) -> str:
    return hashlib.sha256(pixels.cpu().numpy().tobytes()).hexdigest()[:16]


def read(loader: StreamPrefetchLoader[Any], epoch: int) -> dict[str, Any]:
    """Read one epoch: which items, with which pixels, on which device."""
    loader.sampler.set_epoch(epoch)
    items, pixels, devices = [], [], set()
    for images, indices in loader:
        items += indices.tolist()
        pixels.append(digest(images))
        devices |= {str(images.device), str(indices.device)}
    return {"items": items, "pixels": pixels, "devices": sorted(devices)}


def read_all(loader: StreamPrefetchLoader[Any]) -> list[dict[str, Any]]:
    return [read(loader, epoch) for epoch in range(NUM_EPOCHS)]


def items_of_bare_loader(epoch: int) -> list[int]:
    """Read the same source without the loader."""
    bare = build_loader(None, seed=0).source
    bare.sampler.set_epoch(epoch)
    return [int(item) for _, indices in bare for item in indices]


def save_in_mid_epoch(device: str | None, path: Path) -> dict[str, Any]:
    """Save in the middle of epoch 1; give the epoch as it went on from there."""
    loader = build_loader(device, seed=7)
    read(loader, 0)
    loader.sampler.set_epoch(1)
    items, pixels = [], []
    for number, (images, indices) in enumerate(loader, start=1):
        if number > SAVED_AFTER:
            items += indices.tolist()
            pixels.append(digest(images))
        if number == SAVED_AFTER:
            torch.save(loader.state_dict(), path)
    return {"items": items, "pixels": pixels}


def resume(device: str | None, path: Path) -> dict[str, Any]:
    """Go on from a state; give the rest of the epoch, or how it was refused."""
    loader = build_loader(device, seed=7)
    try:
        loader.load_state_dict(torch.load(path))
    except GpuPrefetchError as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    rest = read(loader, 1)
    del rest["devices"]
    return rest


def observe(device: str | None, out: Path) -> dict[str, Any]:
    """Look at everything that the test asks about."""
    rank = int(os.environ["RANK"])
    torch.manual_seed(3)
    before_group = read_all(build_loader(device, seed=7))
    dist.init_process_group("gloo" if device == "cpu" else "nccl")
    current_before = torch.cuda.current_device() if device != "cpu" else None
    with_group = read_all(build_loader(device, seed=7))
    torch.manual_seed(3)
    unseeded = read_all(build_loader(device, seed=None))
    saved = out / f"state-{dist.get_world_size()}-{rank}.pt"
    return {
        "world_size": dist.get_world_size(),
        "before_group": before_group,
        "with_group": with_group,
        "again": read_all(build_loader(device, seed=7)),
        "workers": read_all(build_loader(device, seed=7, num_workers=1)),
        "unseeded": unseeded,
        "bare_items": [items_of_bare_loader(epoch) for epoch in range(NUM_EPOCHS)],
        "went_on": save_in_mid_epoch(device, saved),
        "resumed": resume(device, saved),
        # As saved by the same rank of a run with another number of ranks.
        "foreign": {
            path.name: resume(device, path)
            for path in sorted(out.glob(f"state-*-{rank}.pt"))
            if path != saved
        },
        "current_before": current_before,
        "current_after": torch.cuda.current_device() if device != "cpu" else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_args()
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # None on GPUs: what a pass finds as the current device is to be taken.
    device = "cpu" if options.device == "cpu" else None
    seen = observe(device, options.out)
    (options.out / f"rank-{dist.get_rank()}.json").write_text(json.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
