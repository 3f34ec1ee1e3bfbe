"""How do several processes train together, each with its own augmentation?

    python examples/train_ddp.py                                    # one process
    torchrun --nproc_per_node=2 examples/train_ddp.py               # two CPUs or GPUs
    torchrun --nproc_per_node=2 examples/train_ddp.py --device cpu

Trains on upright handwritten digits, rotated at random, to read rotated ones: at least
85 % of them. Each rank reads its own share (``DistributedSampler``) and draws its own
angles, all from one seed. With ``--checkpoint FILE`` a run that was stopped, in the
middle of an epoch too, goes on where it was, to the very same weights.
"""

import argparse
import hashlib
import os
from pathlib import Path
from typing import Any

import kornia.augmentation as K
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from gpuprefetch import StreamPrefetchLoader
from gpuprefetch.digits import (
    DEGREES,
    accuracy,
    build_digit_model,
    load_digits,
    rotate_digits,
)

STATED_ACCURACY = 0.85
GLOBAL_BATCH = 60  # Images in a step, over all ranks.


def join(device_type: str) -> torch.device:
    """Meet the other processes; give the device of this one."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if device_type == "cuda":
        # First of all: without it, every process would work on the first GPU.
        torch.cuda.set_device(local_rank)
    # Not started by torchrun: a group of one.
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(
        "nccl" if device_type == "cuda" else "gloo",
        **({} if "RANK" in os.environ else alone),
    )
    return torch.device(device_type, local_rank if device_type == "cuda" else None)


def build_loader(device: torch.device) -> StreamPrefetchLoader[Any]:
    """Give the batches of this rank."""
    digits = load_digits("train")
    share = DataLoader(
        digits,
        GLOBAL_BATCH // dist.get_world_size(),
        sampler=DistributedSampler(digits, seed=0, drop_last=True),
        drop_last=True,
    )
    augment = K.RandomRotation(DEGREES, p=1.0)
    # The same seed on each rank: the rank itself is mixed in by the loader.
    return StreamPrefetchLoader(share, transform=augment, device=device, seed=0)


class Training:
    """Model, optimizer and loader of one rank, and how far they have come.

    Args:
        device: Of this rank.
        num_epochs: For the learning rate's schedule.
    """

    def __init__(self, device: torch.device, num_epochs: int) -> None:
        torch.manual_seed(0)
        self.loader = build_loader(device)
        device_ids = None if device.type == "cpu" else [device.index]
        self.model = DistributedDataParallel(
            build_digit_model().to(device), device_ids=device_ids
        )
        self._criterion = nn.CrossEntropyLoss()
        self._optimizer = torch.optim.Adam(self.model.parameters())
        self._schedule = torch.optim.lr_scheduler.OneCycleLR(
            self._optimizer, 0.01, total_steps=num_epochs * len(self.loader)
        )
        self.epoch = 0
        self.num_steps = 0

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        """Train on one batch of this rank; DDP averages the gradients."""
        self._optimizer.zero_grad()
        self._criterion(self.model(images), labels).backward()
        self._optimizer.step()
        self._schedule.step()
        self.num_steps += 1

    def save(self, path: Path) -> None:
        """Write a checkpoint; every rank's place in its own share goes into it."""
        loaders: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(loaders, self.loader.state_dict())
        if dist.get_rank() == 0:
            checkpoint = {name: part.state_dict() for name, part in self._parts()}
            counts = {"epoch": self.epoch, "num_steps": self.num_steps}
            torch.save({**checkpoint, **counts, "loaders": loaders}, path)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint."""
        checkpoint = torch.load(path, map_location="cpu")
        for name, part in self._parts():
            part.load_state_dict(checkpoint[name])
        self.loader.load_state_dict(checkpoint["loaders"][dist.get_rank()])
        self.epoch, self.num_steps = checkpoint["epoch"], checkpoint["num_steps"]

    def _parts(self) -> list[tuple[str, Any]]:
        return [
            ("model", self.model.module),
            ("optimizer", self._optimizer),
            ("schedule", self._schedule),
        ]


def train(training: Training, options: argparse.Namespace) -> bool:
    """Train until the end, or until the run is to be stopped.

    Returns:
        Whether it came to the end.
    """
    for epoch in range(training.epoch, options.epochs):
        training.epoch = epoch
        training.loader.sampler.set_epoch(epoch)
        for images, labels in training.loader:
            training.step(images, labels)
            if training.num_steps == options.stop_after:
                training.save(options.checkpoint)
                return False
    return True


def report(model: nn.Module) -> float:
    """Print what the model has learnt; give its accuracy on rotated digits."""
    images, labels = load_digits("test").tensors
    upright = accuracy(model, images, labels)
    rotated = accuracy(model, rotate_digits(images), labels)
    weights = hashlib.sha256()
    for weight in model.parameters():
        weights.update(weight.detach().cpu().numpy().tobytes())
    print(f"ranks: {dist.get_world_size()}, device {next(model.parameters()).device}")
    print(f"weights: {weights.hexdigest()[:16]}")
    print(f"read right: {upright:.1%} upright, {rotated:.1%} rotated")
    return rotated


def main(arguments: list[str] | None = None) -> None:
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default=default_device)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--checkpoint", type=Path, help="go on from here, if it exists")
    parser.add_argument(
        "--stop-after", type=int, help="write the checkpoint after so many steps, stop"
    )
    options = parser.parse_args(arguments)
    if options.stop_after is not None and options.checkpoint is None:
        parser.error("--stop-after needs --checkpoint FILE")

    torch.backends.cudnn.deterministic = True
    torch.set_num_threads(1)  # Digits are small: more threads cost more than they save.
    training = Training(join(options.device), options.epochs)
    try:
        if options.checkpoint is not None and options.checkpoint.exists():
            training.load(options.checkpoint)
        is_done = train(training, options)
        if dist.get_rank() == 0 and is_done:
            rotated = report(training.model.module)
            if rotated < STATED_ACCURACY:
                raise SystemExit(f"missed the stated {STATED_ACCURACY:.0%}")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
