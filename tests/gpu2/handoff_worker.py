"""Are batches intact while NCCL reduces gradients beside the loop? One rank of it.

    torchrun --nproc_per_node=2 tests/gpu2/handoff_worker.py --out DIR

Each rank reads batches late, as ``tests/gpu/test_handoff.py`` does, and starts an
all-reduce in every step that it waits for in the next, as DDP does. Then once more with
each half of the hand-off switched off: the check must see that.
"""

import argparse
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from gpuprefetch import streams
from tests.gpu.support import PAUSE_CYCLES, HostMemory
from tests.gpu.test_handoff import count_wrong_batches

_NUM_BATCHES = 400
_NUM_REDUCED = 1 << 22  # float32 values: 16 MB, a usual bucket of gradients.
# The loop's stream comes to the reading only behind the reduction before, and the host
# packs and starts another one meanwhile: the side stream has to be later than that.
_PAUSE_CYCLES = 4 * PAUSE_CYCLES

_WAYS: tuple[tuple[HostMemory, bool], ...] = (
    ("pinned", False),
    ("pinned", True),
    ("pageable", False),
    ("pageable", True),
)


class Reducer:
    """Starts an all-reduce in each step and waits for it in the next one."""

    def __init__(self) -> None:
        self._values = torch.empty(_NUM_REDUCED, device="cuda")
        self._work: Any = None
        self._num_wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        self.num_started = 0

    def step(self) -> None:
        """Check the sum of the step before; start the next."""
        self._check()
        self._values.fill_(dist.get_rank() + 1)
        self._work = dist.all_reduce(self._values, async_op=True)
        self.num_started += 1

    def _check(self) -> None:
        if self._work is not None:
            self._work.wait()
            expected = sum(range(1, dist.get_world_size() + 1))
            self._num_wrong += (self._values != expected).any()
            self._work = None

    def finish(self) -> int:
        """Wait for the last one; give how many sums were wrong."""
        self._check()
        return int(self._num_wrong)


@contextmanager
def switched_off(half: str) -> Iterator[None]:
    """Leave out one half of the hand-off."""
    fakes: dict[str, Any] = {
        "enqueue_wait": lambda event, device: torch.cuda.current_stream(device),
        "record_use": lambda leaf, stream: None,
    }
    with mock.patch.object(streams, half, fakes[half]):
        yield


def count_wrong(memory: HostMemory, background: bool) -> dict[str, int]:
    """Count batches and sums that were not intact."""
    reducer = Reducer()
    wrong = count_wrong_batches(
        memory,
        background,
        num_batches=_NUM_BATCHES,
        in_step=reducer.step,
        pause_cycles=_PAUSE_CYCLES,
    )
    return {
        "wrong_batches": wrong,
        "wrong_sums": reducer.finish(),
        "all_reduces": reducer.num_started,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    seen: dict[str, Any] = {}
    for memory, background in _WAYS:
        name = f"{memory}-{'thread' if background else 'inline'}"
        seen[name] = count_wrong(memory, background)
        for half in ("enqueue_wait", "record_use"):
            with switched_off(half):
                seen[f"{name} without {half}"] = count_wrong(memory, background)
    (options.out / f"handoff-{dist.get_rank()}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
