"""What does a second GPU bring, with the input pipeline and without?

    torchrun --nproc_per_node=1 -m benchmarks.ddp --out one.json
    torchrun --nproc_per_node=2 -m benchmarks.ddp --out two.json
    python -m benchmarks.ddp --join one.json two.json --out report.json

Each rank trains the seed's model under DistributedDataParallel, on batches of its own.
Pipelines take turns, round by round, at the same time on all ranks; the speed of a
round is that of the slowest rank. ``--join`` puts the two runs side by side and holds
them to the targets. ``--device cpu --tiny`` only shows that the code runs.

Where the scaling of the loop falls short of 1, so does that of the step alone: the
all-reduce is part of both. What the input pipeline adds is the difference.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks import pipelines
from benchmarks.loops import Over
from benchmarks.machine import describe_machine
from benchmarks.markdown import SCALING
from benchmarks.measure import in_turns, time_loop
from benchmarks.pipelines import NUM_CLASSES, Pair
from benchmarks.targets import TINY, Figure, Sizes
from gpuprefetch import workloads
from gpuprefetch.plural import counted

# What is held to targets.
_HELD = "memory: ours, fused chain"
# Of the model-only bound, per rank, with the fused chain and batches in memory.
_LEAST_OF_BOUND = 0.97
# What the input pipeline may cost of the scaling of the step alone.
_LEAST_OF_SCALING = 0.97


# As many steps over a DataLoader as over batches in memory; workers are of each rank.
_SIZES = Sizes(steps=100, rounds=4)

Variants = dict[str, Callable[[], Iterator[Pair]]]


def build_variants(sizes: Sizes, device: torch.device) -> Variants:
    """Name the pipelines; see ``pipelines``.

    The chain is the seed's: crop, resize, rotate, blur, normalize.
    """
    size, batch = sizes.image_size, sizes.batch_size
    in_memory = pipelines.InMemory(batch, size, pin=True)
    with_workers = partial(
        pipelines.data_loader, batch, size, num_workers=sizes.num_workers
    )
    ours = pipelines.stream_prefetch
    chain = workloads.kornia_chain(size)
    return {
        "bound": lambda: pipelines.resident(batch, size, device),
        _HELD: lambda: ours(in_memory, device, chain),
        "memory: ours, copy": lambda: ours(in_memory, device),
        "memory: plain, copy": lambda: pipelines.plain(in_memory, device),
        "workers: ours, fused chain": lambda: ours(
            with_workers(pin=False), device, chain
        ),
        "workers: plain, copy": lambda: pipelines.plain(with_workers(pin=True), device),
    }


def measure(sizes: Sizes, device: torch.device) -> dict[str, list[float]]:
    """Give steps/s of each pipeline, one number a round, of the slowest rank."""
    torch.manual_seed(0)
    model = workloads.build_model(sizes.image_size, NUM_CLASSES).to(device)
    device_ids = [device.index] if device.type == "cuda" else None
    # A learning rate of 0: the same work, but the numbers stay as they are.
    step = workloads.TrainingStep(
        DistributedDataParallel(model, device_ids=device_ids), learning_rate=0.0
    )
    variants = build_variants(sizes, device)
    speeds: dict[str, list[float]] = {name: [] for name in variants}
    for _, name in in_turns(list(variants), sizes.rounds):
        dist.barrier()
        timing = time_loop(
            lambda start=variants[name]: Over(start(), step),
            device,
            steps=sizes.steps,
            warmup=sizes.warmup,
        )
        speeds[name].append(_slowest(timing.steps_per_s, device))
    return speeds


def _slowest(speed: float, device: torch.device) -> float:
    shared = torch.tensor(speed, dtype=torch.float64, device=device)
    dist.all_reduce(shared, op=dist.ReduceOp.MIN)
    return float(shared)


def run_rank(options: argparse.Namespace) -> None:
    """Measure as one rank of torchrun; the first one writes the report."""
    local_rank = int(os.environ["LOCAL_RANK"])
    if options.device == "cuda":
        torch.cuda.set_device(local_rank)
        torch.backends.cudnn.benchmark = True
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    device = torch.device(
        options.device, local_rank if options.device == "cuda" else None
    )
    sizes = TINY if options.tiny else _SIZES
    speeds = measure(sizes, device)
    if dist.get_rank() == 0:
        report = {"num_ranks": dist.get_world_size(), "steps_per_s": speeds}
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    dist.destroy_process_group()


# Side by side #


def _figure(
    name: str, samples: list[float], unit: str, at_least: float | None = None
) -> dict[str, Any]:
    median = statistics.median(samples)
    return Figure(name, median, unit, at_least, samples=samples).to_json()


def join_runs(
    runs: list[dict[str, Any]], *, is_held: bool = True
) -> list[dict[str, Any]]:
    """Compare the runs on one and on two ranks.

    Args:
        runs: What :func:`run_rank` wrote, for one rank and for two.
        is_held: Whether figures have targets: not where sizes are tiny.

    Returns:
        Figures: speeds per rank, fractions of the bound, scaling.
    """
    figures = []
    for run in runs:
        title = counted(run["num_ranks"], "GPU")
        speeds = run["steps_per_s"]
        for name, samples in speeds.items():
            figures.append(_figure(f"{title}: {name}", samples, "steps/s"))
        for name, samples in speeds.items():
            least = _LEAST_OF_BOUND if is_held and name == _HELD else None
            ratios = [a / b for a, b in zip(samples, speeds["bound"], strict=True)]
            if name != "bound":
                figures.append(
                    _figure(f"{title}: {name}, of bound", ratios, "x", least)
                )
    least = _LEAST_OF_SCALING if is_held else None
    return figures + _scaling(*(run["steps_per_s"] for run in runs), at_least=least)


def _scaling(
    one: dict[str, list[float]],
    two: dict[str, list[float]],
    *,
    at_least: float | None,
) -> list[dict[str, Any]]:
    """Compare a rank's speed beside another one with its speed alone."""
    efficiency = {
        name: statistics.median(two[name]) / statistics.median(one[name])
        for name in one
    }
    figures = [
        _figure(f"{SCALING}{name}", [value], "x") for name, value in efficiency.items()
    ]
    ours = efficiency[_HELD] / efficiency["bound"]
    name = "scaling of ours, fused chain, over that of the bound"
    return [*figures, _figure(name, [ours], "x", at_least)]


def join(options: argparse.Namespace) -> int:
    """Write the report of two runs; the exit status says whether targets were met."""
    runs = [json.loads(path.read_text()) for path in options.join]
    figures = join_runs(runs, is_held=not options.tiny)
    for figure in figures:
        verdict = {True: "ok", False: "MISSED", None: ""}[figure["passed"]]
        print(f"{figure['name']:58s} {figure['value']:9.3f} {figure['unit']} {verdict}")
    report = {"machine": describe_machine(), "figures": figures}
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    return int(any(figure["passed"] is False for figure in figures))


def main() -> int:
    """Run from the command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="only show that it runs")
    parser.add_argument(
        "--join", nargs=2, type=Path, help="reports of one rank and of two ranks"
    )
    options = parser.parse_args()
    if options.join:
        return join(options)
    run_rank(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
