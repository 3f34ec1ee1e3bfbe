"""Does the fused augmentation reach on this GPU what it promises?

    python -m benchmarks.fused [--out FILE] [--budget-s 150] [--tiny]

Like ``must_reach``, whose way of measuring this uses: variants take turns, a ratio is
the median of the ratios of single rounds, and the exit status is 1 if a target was
missed or not measured. On a machine without a GPU it only shows that the code runs.

How to read it: "over bound" is the speed of training through the loader over that of
the same steps on one batch that lies on the device; "over copy" is the kernel's time
over that of copying its result on the device, which no kernel with this result can beat
by much.
"""

import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from benchmarks import next_time, pipelines
from benchmarks.chains import imagenet_chain, jitter_chain
from benchmarks.measure import synchronize, work_on_device
from benchmarks.pipelines import Pair
from benchmarks.targets import Bench, Sizes, parse_options, run_with
from gpuprefetch import workloads
from gpuprefetch.augment.fused import FusedAugmentation
from gpuprefetch.augment.fusing import fuse
from gpuprefetch.augment.operator import augment
from gpuprefetch.augment.variant import How

# (steps, rounds) of training per batch size: about ten seconds each on an H200.
_TRAINING = {32: (150, 5), 128: (50, 5)}
_TINY_TRAINING = {2: (4, 2)}

Variants = dict[str, Callable[[], Iterator[Pair]]]


# Training #


def measure_training(bench: Bench) -> None:
    """Train over batches in memory, through the loader and with no pipeline."""
    sizes, device = bench.sizes, bench.device
    plan = _TINY_TRAINING if sizes.batch_size < 32 else _TRAINING
    for batch_size, (steps, rounds) in plan.items():
        size = batch_size, sizes.image_size
        pinned = pipelines.InMemory(*size, pin=True)
        chain = workloads.kornia_chain(sizes.image_size)
        once = fuse(chain, resampling="single")
        variants: Variants = {
            "bound": lambda size=size: pipelines.resident(*size, device),
            "chained": lambda pinned=pinned, chain=chain: pipelines.stream_prefetch(
                pinned, device, chain
            ),
            "single": lambda pinned=pinned, once=once: pipelines.stream_prefetch(
                pinned, device, once
            ),
        }
        speeds = bench.in_turns(variants, steps=steps, rounds=rounds)
        bench.add_speeds(f"training, B={batch_size}", speeds)
        for name, least in (("chained", 0.975), ("single", 0.985)):
            title = f"training, B={batch_size}: {name} / bound"
            bench.add_ratio(title, speeds, name, "bound", at_least=least)


def measure_jitter(bench: Bench) -> None:
    """Train with a chain that takes two launches, one of them for a mean."""
    sizes, device = bench.sizes, bench.device
    size = sizes.batch_size, sizes.image_size
    pinned, chain = pipelines.InMemory(*size, pin=True), jitter_chain(sizes.image_size)

    def serial(images: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = chain(workloads.to_unit_float(images))
        return out

    variants: Variants = {
        "bound": lambda: pipelines.resident(*size, device),
        "ours": lambda: pipelines.stream_prefetch(pinned, device, chain),
        "serial Kornia": lambda: pipelines.plain(pinned, device, serial),
    }
    speeds = bench.in_turns(variants, steps=max(sizes.steps // 3, 4), rounds=3)
    bench.add_speeds("with ColorJitter", speeds)
    for name in ("bound", "serial Kornia"):
        bench.add_ratio(f"with ColorJitter: ours / {name}", speeds, "ours", name)


# The host #


def measure_host(bench: Bench) -> None:
    """Time next() when nothing has to be waited for: the host's work per batch."""
    sizes, device = bench.sizes, bench.device
    pinned = pipelines.InMemory(sizes.batch_size, sizes.image_size, pin=True)
    chain = workloads.kornia_chain(sizes.image_size)
    cases: dict[str, tuple[Any, dict[str, float]]] = {
        "fused chain": (chain, {"at_most": 150.0}),
        "fused chain, single": (fuse(chain, resampling="single"), {}),
        "imagenet chain": (imagenet_chain(sizes.image_size * 7 // 8), {}),
        "no transform": (None, {}),
        "chain with ColorJitter": (jitter_chain(sizes.image_size), {}),
    }
    starts: Variants = {
        name: lambda transform=transform: pipelines.stream_prefetch(
            pinned, device, transform
        )
        for name, (transform, _) in cases.items()
    }
    starts["copy by hand, one ahead"] = lambda: pipelines.one_ahead(pinned, device)
    next_us, _ = next_time.time_next_in_turns(
        starts,
        rounds=sizes.overhead_rounds,
        steps=sizes.overhead_steps,
        pause=next_time.make_busy(device),
    )
    for name, samples in next_us.items():
        target = cases[name][1] if name in cases else {}
        median = statistics.median(samples)
        bench.add(f"next(), {name}", median, "us", samples=samples, **target)


def measure_counts(bench: Bench) -> None:
    """Count launches, copies and waits per batch, with torch's profiler."""
    sizes, device = bench.sizes, bench.device
    if device.type != "cuda":
        return
    pinned = pipelines.InMemory(sizes.batch_size, sizes.image_size, pin=True)
    chain, count = workloads.kornia_chain(sizes.image_size), 20
    batches = pipelines.stream_prefetch(pinned, device, chain)
    for _ in range(10):
        next(batches)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        for _ in range(count):
            next(batches)
        torch.cuda.synchronize()
    found = Counter(
        "copies" if event.name.startswith("Memcpy") else "launches"
        for event in work_on_device(recorded)
    )
    waits = sum(
        event.name in ("cudaStreamSynchronize", "cudaMemcpy")
        for event in recorded.events()
    )
    bench.add("launches per batch", found["launches"] / count, "", at_most=2.0)
    # Images and labels are copied too.
    numbers = found["copies"] / count - 2
    bench.add("copies of parameters per batch", numbers, "", at_most=1.0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(count):
            next(batches)
    except RuntimeError as error:
        print(error)
        waits += 1
    finally:
        torch.cuda.set_sync_debug_mode("default")
        batches.close()  # type: ignore[attr-defined]
    bench.add("host synchronizations", float(waits), "", at_most=0.0)


# The kernel #


def measure_kernel(bench: Bench) -> None:
    """Time the kernel and a copy of its result, in turns, as replays of graphs."""
    if bench.device.type != "cuda":
        return
    size = bench.sizes.image_size
    chain = workloads.kornia_chain(size)
    chained, single = fuse(chain), fuse(chain, resampling="single")
    for batch in (32, 128, 512):
        cases = {
            "chained": (chained, {"at_most": 5.0}),
            "single": (single, {"at_most": 2.5}),
        }
        _kernel_over_copy(bench, f"kernel, B={batch}", cases, batch, size)
    imagenet = fuse(
        imagenet_chain(224), dtype=torch.bfloat16, memory_format=torch.channels_last
    )
    title = "imagenet, bf16 channels_last, B=256"
    _kernel_over_copy(bench, title, {"chained": (imagenet, {})}, 256, size)


def _kernel_over_copy(
    bench: Bench,
    title: str,
    cases: dict[str, tuple[FusedAugmentation, dict[str, float]]],
    batch: int,
    size: int,
) -> None:
    # Enough sets of images that none is found in the cache of 50 MB.
    count = max(2, 256 // batch)
    images = [
        torch.randint(
            0, 256, (batch, 3, size, size), dtype=torch.uint8, device=bench.device
        )
        for _ in range(count)
    ]
    some = next(iter(cases.values()))[0](images[0])
    sources = [torch.empty_like(some).copy_(some) for _ in range(count)]
    replays = {"copy": _captured(lambda index: sources[index].clone(), count)}
    for name, (fused, _) in cases.items():
        replays[name] = _captured(_launching(fused, images), count)
    samples: dict[str, list[float]] = {name: [] for name in replays}
    for _ in range(15):
        for name, replay in replays.items():
            samples[name].append(_device_us(replay) / count)
    for name, values in samples.items():
        bench.add(f"{title}: {name}", statistics.median(values), "us", samples=values)
    for name, (_, target) in cases.items():
        pairs = zip(samples[name], samples["copy"], strict=True)
        ratios = [ours / copy for ours, copy in pairs]
        median = statistics.median(ratios)
        bench.add(f"{title}: {name} / copy", median, "x", samples=ratios, **target)


def _launching(
    fused: FusedAugmentation, images: list[torch.Tensor]
) -> Callable[[int], torch.Tensor]:
    """Launch the plan on one set of images with numbers that lie on the device."""
    (piece,) = fused._pieces()
    shape = images[0].shape
    generator = torch.Generator().manual_seed(1)
    packs = [
        fused.sample(shape, generator).flat.view(shape[0], -1).to(images[0].device)
        for _ in images
    ]

    how = How(
        fused.dtype or torch.float32,
        fused.is_channels_last,
        fused.resampling,
        fused.outside,
    )

    def launch(index: int) -> torch.Tensor:
        return augment(images[index], packs[index], piece.key, how)

    return launch


def _captured(work: Callable[[int], object], count: int) -> Callable[[], None]:
    """Capture ``work(0)`` to ``work(count - 1)`` as one graph."""
    for index in range(count):
        work(index)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(count):
            work(index)
    graph.replay()
    return graph.replay


def _device_us(replay: Callable[[], None], repeats: int = 10) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / repeats


def measure_against_kornia(bench: Bench) -> None:
    """Call the transform alone on images on the device: Kornia, and fused."""
    sizes, device = bench.sizes, bench.device
    shape = (sizes.batch_size, 3, sizes.image_size, sizes.image_size)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
    least = {"at_least": 60.0} if device.type == "cuda" else {}
    chains: dict[str, tuple[nn.Module, dict[str, float]]] = {
        "demo chain": (workloads.kornia_chain(sizes.image_size), least),
        "imagenet chain": (imagenet_chain(sizes.image_size * 7 // 8), {}),
        "with ColorJitter": (jitter_chain(sizes.image_size), {}),
    }
    calls = 10 if device.type == "cuda" else 1
    for name, (chain, target) in chains.items():
        fused = fuse(chain)
        times: dict[str, list[float]] = {"Kornia": [], "fused": []}
        for _ in range(7):
            for variant, transform in (("Kornia", chain), ("fused", fused)):
                is_fused = variant == "fused"
                synchronize(device)
                repeats = calls * (10 if is_fused else 1)
                started = time.perf_counter()
                with torch.no_grad():
                    for _ in range(repeats):
                        transform(
                            images if is_fused else workloads.to_unit_float(images)
                        )
                synchronize(device)
                spent = (time.perf_counter() - started) * 1e6 / repeats
                times[variant].append(spent)
        for variant, samples in times.items():
            title = f"transform alone, {name}: {variant}"
            bench.add(title, statistics.median(samples), "us", samples=samples)
        pairs = zip(times["Kornia"], times["fused"], strict=True)
        ratios = [kornia / ours for kornia, ours in pairs]
        title = f"transform alone, {name}: Kornia / fused"
        bench.add(title, statistics.median(ratios), "x", samples=ratios, **target)


_MEASUREMENTS = (
    measure_host,
    measure_counts,
    measure_kernel,
    measure_training,
    measure_against_kornia,
    measure_jitter,
)


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line; see the module's docstring."""
    options = parse_options("fused", __doc__ or "").parse_args(arguments)
    return run_with(options, replace(Sizes(), warmup=10), _MEASUREMENTS)


if __name__ == "__main__":
    sys.exit(main())
