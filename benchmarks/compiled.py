"""How fast is Kornia's chain under torch.compile?

    python -m benchmarks.compiled [--batch-size 32] [--image-size 256] [--tiny]

A process of its own, since compiling may take minutes, or never end: the suite gives it
a time limit. Prints one line of JSON: seconds that the first calls took, and batches
per second after them, in rounds.
"""

import argparse
import json
import time
import warnings

import torch
from torch import nn

from benchmarks.chains import AsFunction
from benchmarks.loops import Repeat
from benchmarks.measure import time_loop
from gpuprefetch import workloads

__all__ = ["main"]

_ROUNDS = 3
_FIRST_CALLS = 3  # Shapes that turn out to vary are compiled once more.


def measure(
    chain: nn.Module, images: torch.Tensor, *, backend: str, steps: int
) -> dict[str, object]:
    """Compile a chain and time it.

    Args:
        chain: Takes float images.
        images: (B, 3, H, W), uint8, on the device.
        backend: Of ``torch.compile``.
        steps: Calls in a round.
    """
    compiled = torch.compile(AsFunction(chain), backend=backend)

    def call() -> None:
        with torch.no_grad():
            compiled(images)

    started = time.perf_counter()
    for _ in range(_FIRST_CALLS):
        call()
    compile_s = time.perf_counter() - started
    speeds = [
        time_loop(
            lambda: Repeat(call), images.device, steps=steps, warmup=2
        ).steps_per_s
        for _ in range(_ROUNDS)
    ]
    return {"compile_s": compile_s, "speeds": speeds}


def main(arguments: list[str] | None = None) -> None:
    """Run from the command line; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="benchmarks.compiled")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--image-size", type=int, default=256)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument(
        "--tiny", action="store_true", help="one member, not even compiled to kernels"
    )
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    shape = (options.batch_size, 3, options.image_size, options.image_size)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, device=options.device)
    chain = workloads.kornia_chain(options.image_size)
    print(
        json.dumps(
            measure(
                chain[-1:] if options.tiny else chain,
                images,
                backend="eager" if options.tiny else "inductor",
                steps=2 if options.tiny else 30,
            )
        )
    )


if __name__ == "__main__":
    main()
