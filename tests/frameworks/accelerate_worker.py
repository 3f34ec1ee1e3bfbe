"""What does one of several processes of Accelerate get? Run by torchrun.

Trains nothing: notes items, pixels, and when Accelerate sees the end of the epoch.
"""

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import kornia.augmentation as K
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from gpuprefetch import StreamPrefetchLoader
from gpuprefetch.integrations.accelerate import prepare
from tests.ranks_worker import BATCH_SIZE, SameImage


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    accelerator = Accelerator(cpu=True)
    # Accelerate makes the order the same on all ranks; each rank starts from its own.
    torch.manual_seed(accelerator.process_index)
    loader = StreamPrefetchLoader(
        DataLoader(SameImage(), BATCH_SIZE, shuffle=True),
        K.RandomRotation(90.0, p=1.0),
        device=accelerator.device,
        background=True,
        depth=4,
        seed=0,
    )
    batches = prepare(accelerator, loader)
    seen: dict[str, Any] = {"epochs": [], "pixels": [], "ends": [], "gathered": []}
    for _ in range(2):
        items = []
        for images, labels in batches:
            items += labels.tolist()
            pixels = hashlib.sha256(images.numpy().tobytes()).hexdigest()
            seen["pixels"].append(pixels)
            seen["ends"].append(accelerator.gradient_state.end_of_dataloader)
            gathered = accelerator.gather_for_metrics(labels)
            seen["gathered"] += gathered.tolist()
        seen["epochs"].append(items)
        seen["length"] = len(batches)
    path = options.out / f"accelerate-{accelerator.process_index}.json"
    path.write_text(json.dumps(seen))
    accelerator.end_training()


if __name__ == "__main__":
    main()
