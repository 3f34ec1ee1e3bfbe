"""Does the loader reach on this machine what it promises?

    python -m benchmarks.must_reach [--out FILE] [--budget-s 200] [--tiny]

Every figure is compared within this one run: variants take turns, round by round, and a
ratio is the median of the ratios of single rounds. Absolute numbers of two machines, or
of two runs, are not to be compared.

Prints one line for each figure, with its target and "ok" or "MISSED" where it has one,
and writes them as JSON. The exit status is 1 if a target was missed or not measured.
How to read them: see README.md in this directory.
"""

import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch

from benchmarks import next_time, pipelines
from benchmarks.pipelines import Pair
from benchmarks.targets import Bench, Sizes, parse_options, run_with
from gpuprefetch import host_lead, workloads

# What is measured #


def measure_overhead(bench: Bench) -> None:
    """Time next() when nothing has to be waited for: the loader's own work.

    Held to the target on a host that is busy between two batches, as a training loop
    is. After a sleep everything takes longer, the same work written by hand too.
    """
    sizes, device = bench.sizes, bench.device
    pinned = pipelines.InMemory(sizes.batch_size, sizes.image_size, pin=True)
    pageable = pipelines.InMemory(sizes.batch_size, sizes.image_size, pin=False)
    ours = pipelines.stream_prefetch
    chain = workloads.kornia_chain(sizes.image_size)
    # Batches from pageable memory are packed by a thread, or else by next() itself.
    cases: dict[str, tuple[Callable[[], Iterator[Pair]], dict[str, float]]] = {
        "pinned": (lambda: ours(pinned, device, None), {"at_most": 100.0}),
        "staged, thread": (
            lambda: ours(pageable, device, None, background=True),
            {"at_most": 100.0},
        ),
        "Kornia chain, fused": (
            lambda: ours(pinned, device, chain),
            {"at_most": 150.0},
        ),
        "pinned, float": (lambda: ours(pinned, device), {}),
    }
    by_hand = pipelines.one_ahead
    cases["by hand, pinned"] = (lambda: by_hand(pinned, device, _same), {})
    starts = {name: start for name, (start, _) in cases.items()}
    next_us, drop_us = next_time.time_next_in_turns(
        starts,
        rounds=sizes.overhead_rounds,
        steps=sizes.overhead_steps,
        pause=next_time.make_busy(device),
    )
    for name, (_, target) in cases.items():
        samples = next_us[name]
        median = statistics.median(samples)
        bench.add(f"next(), {name}", median, "us", samples=samples, **target)
        bench.add(f"next(), {name}: p90", _p90(samples), "us")
        bench.add(f"dropping the batch, {name}", drop_us[name], "us")
    pinned_only = {name: starts[name] for name in starts if "pinned" in name}
    next_us, _ = next_time.time_next_in_turns(
        pinned_only, rounds=1, steps=sizes.overhead_steps, pause=next_time.sleep
    )
    for name, samples in next_us.items():
        median = statistics.median(samples)
        bench.add(f"next(), {name}, after a sleep", median, "us", samples=samples)


def _same(images: torch.Tensor) -> torch.Tensor:
    return images


def _p90(samples: list[float]) -> float:
    return sorted(samples)[int(0.9 * (len(samples) - 1))]


def measure_copy_and_float(bench: Bench) -> None:
    """Train over batches in memory: what copying and converting costs a loop."""
    sizes, device = bench.sizes, bench.device
    size = sizes.batch_size, sizes.image_size
    pinned = pipelines.InMemory(*size, pin=True)
    variants: dict[str, Callable[[], Iterator[Pair]]] = {
        "bound": lambda: pipelines.resident(*size, device),
        "ours": lambda: pipelines.stream_prefetch(pinned, device),
        "plain": lambda: pipelines.plain(pinned, device),
    }
    if device.type == "cuda":
        variants["by hand"] = lambda: pipelines.one_ahead(pinned, device)
    if pipelines.has_timm():
        variants["timm"] = lambda: pipelines.timm_prefetch(pinned, device)
    speeds = bench.in_turns(variants)
    bench.add_speeds("copy + float", speeds)
    bench.add_ratio(
        "copy + float: ours / bound", speeds, "ours", "bound", at_least=0.99
    )
    for name in list(variants)[2:]:
        bench.add_ratio(f"copy + float: {name} / bound", speeds, name, "bound")


def measure_loader_with_workers(bench: Bench) -> None:
    """Train over an unpinned DataLoader, and over a pinned one in the plain loop."""
    sizes, device = bench.sizes, bench.device

    def source(*, pin: bool) -> Any:
        return pipelines.data_loader(
            sizes.batch_size, sizes.image_size, num_workers=sizes.num_workers, pin=pin
        )

    variants: dict[str, Callable[[], Iterator[Pair]]] = {
        "plain, pinned": lambda: pipelines.plain(source(pin=True), device),
        "ours, unpinned": lambda: pipelines.stream_prefetch(source(pin=False), device),
        "plain, unpinned": lambda: pipelines.plain(source(pin=False), device),
        "ours, pinned": lambda: pipelines.stream_prefetch(source(pin=True), device),
    }
    speeds = bench.in_turns(variants, steps=sizes.loader_steps)
    title = f"DataLoader, {sizes.num_workers} workers"
    bench.add_speeds(title, speeds)
    bench.add_ratio(
        f"{title}: ours, unpinned / plain, pinned",
        speeds,
        "ours, unpinned",
        "plain, pinned",
        at_least=1.0,
    )
    for name in ("plain, unpinned", "ours, pinned"):
        ratio = f"{title}: {name} / plain, pinned"
        bench.add_ratio(ratio, speeds, name, "plain, pinned")


def measure_kornia_chain(bench: Bench) -> None:
    """Train with a chain of Kornia augmentations: through ours, and in the loop."""
    sizes, device = bench.sizes, bench.device
    pinned = pipelines.InMemory(sizes.batch_size, sizes.image_size, pin=True)
    chain = workloads.kornia_chain(sizes.image_size)

    def serial(images: torch.Tensor) -> torch.Tensor:
        augmented: torch.Tensor = chain(workloads.to_unit_float(images))
        return augmented

    speeds = bench.in_turns(
        {
            "bound": lambda: pipelines.resident(
                sizes.batch_size, sizes.image_size, device
            ),
            "ours": lambda: pipelines.stream_prefetch(pinned, device, chain),
            "serial": lambda: pipelines.plain(pinned, device, serial),
        },
        rounds=min(sizes.rounds, 5),
        steps=max(sizes.steps * 2 // 3, 1),
    )
    bench.add_speeds("Kornia chain", speeds)
    bench.add_ratio("Kornia chain: ours / serial", speeds, "ours", "serial")
    bench.add_ratio("Kornia chain: ours / bound", speeds, "ours", "bound")


def measure_depth(bench: Bench) -> None:
    """Train with different depths over batches in memory."""
    sizes, device = bench.sizes, bench.device
    pinned = pipelines.InMemory(sizes.batch_size, sizes.image_size, pin=True)
    variants: dict[str, Callable[[], Iterator[Pair]]] = {
        f"depth {depth}": lambda depth=depth: pipelines.stream_prefetch(
            pinned, device, depth=depth
        )
        for depth in (1, 2, 3, 4)
    }
    speeds = bench.in_turns(variants)
    bench.add_speeds("copy + float", speeds)
    for depth in (1, 3, 4):
        name = f"copy + float: depth {depth} / depth 2"
        bench.add_ratio(name, speeds, f"depth {depth}", "depth 2")


def measure_host_lead(bench: Bench) -> None:
    """Train with and without the bound on how far the host may be ahead."""
    sizes, device = bench.sizes, bench.device
    pinned = pipelines.InMemory(sizes.batch_size, sizes.image_size, pin=True)
    unbounded = mock.patch.object(host_lead.HostLead, "wait_in_bounds")

    def start(*, is_bounded: bool) -> Iterator[Pair]:
        with nullcontext() if is_bounded else unbounded:
            yield from pipelines.stream_prefetch(pinned, device)

    speeds = bench.in_turns(
        {
            "host lead bounded": lambda: start(is_bounded=True),
            "host lead free": lambda: start(is_bounded=False),
        }
    )
    bench.add_speeds("copy + float", speeds)
    bench.add_ratio(
        "copy + float: host lead bounded / free",
        speeds,
        "host lead bounded",
        "host lead free",
    )


# What has targets comes first: the rest is left out when time is short.
_MEASUREMENTS = (
    measure_overhead,
    measure_copy_and_float,
    measure_loader_with_workers,
    measure_kornia_chain,
    measure_depth,
    measure_host_lead,
)


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line; see the module's docstring."""
    options = parse_options("must_reach", __doc__ or "").parse_args(arguments)
    return run_with(options, Sizes(), _MEASUREMENTS)


if __name__ == "__main__":
    sys.exit(main())
