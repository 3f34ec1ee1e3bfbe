"""Is the fused kernel right, and how far is it from copying its output?

    python -m benchmarks.fused_probe out.json [--quick]

Needs a CUDA device and the packages torch and cuda-core; Kornia is used where it can
be imported. Prints one line per check (largest difference to the plain torch applier,
and to Kornia), then one table: microseconds per batch for the seed chain (crop 128,
resize 256, rotation 45, blur 7, normalize; uint8 3x256x256 to float32), for several
tiles, next to a copy of the output. Every time is the median of 7 replays of a CUDA
graph of 20 calls over 4 inputs; host time is not in it, and is printed apart.

How to read it: "x copy" is the time over the copy's; the aim is 2 for chained, 1.5 for
single. A tile line shows threads and blocks per multiprocessor asked for.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gpuprefetch.augment.kernel import why_not
from gpuprefetch.augment.operator import to_unit_range
from gpuprefetch.augment.plan import Plan
from gpuprefetch.augment.plan_kernel import PlanKernel
from gpuprefetch.augment.reference import apply_plan
from gpuprefetch.augment.sample import Sampler
from gpuprefetch.augment.steps import (
    Affine,
    CenterCrop,
    Crop,
    Flip,
    Resize,
    ResizedCrop,
    Rotation,
)
from gpuprefetch.augment.values import Blur, Pointwise
from gpuprefetch.augment.variant import How, Tile

DEVICE = torch.device("cuda", 0)
NORMALIZE = Pointwise("Normalize", (4.0, 4.2, 4.4), (-2.0, -1.9, -1.8))
SEED_CHAIN = Plan(
    (
        Crop("RandomCrop", (128, 128)),
        Resize("Resize", (256, 256)),
        Rotation("RandomRotation", (-45.0, 45.0), p=1.0),
        Blur("RandomGaussianBlur", (7, 7), (0.1, 2.0), p=1.0),
        NORMALIZE,
    )
)
IMAGENET = Plan(
    (
        ResizedCrop("RandomResizedCrop", (224, 224), (0.08, 1.0), (3 / 4, 4 / 3)),
        Flip("RandomHorizontalFlip", "x"),
        NORMALIZE,
    )
)
TILES = {
    "64x32 256 4": Tile(min_blocks=4),
    "64x32 256 3": Tile(min_blocks=3),
    "64x32 192 4": Tile(threads=192, min_blocks=4),
    "64x32 192 5": Tile(threads=192, min_blocks=5, stage_texels=1560),
    "64x32 256 3 floats": Tile(min_blocks=3, stages_floats=True),
    "64x64 512 2": Tile(y=64, threads=512, min_blocks=2, stage_texels=2900),
    "64x64 384 2": Tile(y=64, threads=384, min_blocks=2, stage_texels=2900),
    "32x32 128 8": Tile(x=32, threads=128, min_blocks=8, stage_texels=1000),
    "32x32 96 8": Tile(x=32, threads=96, min_blocks=8, stage_texels=1000),
    "32x64 256 4": Tile(x=32, y=64, min_blocks=4),
    "64x32 strip4": Tile(strip=4, min_blocks=4),
    "64x32 strip16": Tile(strip=16, threads=128, min_blocks=4),
}


def call(
    kernel: PlanKernel, image: torch.Tensor, pack: torch.Tensor, **over: Any
) -> torch.Tensor:
    return kernel(image, pack, How(**{"dtype": torch.float32, **over}))


def random_image(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.uint8:
        return torch.randint(0, 256, shape, dtype=dtype, device=DEVICE)
    if dtype == torch.uint16:
        wide = torch.randint(0, 65536, shape, dtype=torch.int32, device=DEVICE)
        return wide.to(torch.uint16)
    return torch.rand(shape, device=DEVICE).to(dtype)


def check(report: list[dict[str, Any]], is_quick: bool) -> None:
    """Compare with the torch applier on the device, on fresh random inputs."""
    affine = Affine(
        "RandomAffine", (-30, 30), (0.1, 0.2), (0.7, 1.3), (-10, 10, -5, 5), p=0.8
    )
    plans: dict[str, Plan] = {
        "seed chain": SEED_CHAIN,
        "imagenet": IMAGENET,
        "pad crop flip": Plan(
            (
                Crop("c", (50, 61), padding=(4, 4, 4, 4), fill=(0.5,)),
                Flip("f", "x"),
                Flip("g", "y"),
                NORMALIZE,
            )
        ),
        "rotate affine": Plan((Rotation("r", (-45, 45)), affine, NORMALIZE)),
        "resize affine center blur15": Plan(
            (
                Resize("r", (90, 80), align_corners=False),
                Flip("f", "x"),
                affine,
                CenterCrop("c", (70, 66)),
                Blur("b", (15, 9), (0.5, 3.0), "circular"),
            )
        ),
        "shrink rotate": Plan((Resize("r", (40, 30)), Rotation("r", (-45, 45), p=1.0))),
        "blur then rotate": Plan(
            (Blur("b", (5, 5), (0.5, 1.0)), Rotation("r", (0, 90)))
        ),
    }
    cases = [
        (torch.uint8, torch.float32, False),
        (torch.float32, torch.bfloat16, True),
        (torch.float16, torch.float16, False),
        (torch.uint16, torch.float32, True),
        (torch.bfloat16, torch.float32, False),
    ]
    for name, plan in plans.items():
        for source, dtype, last in (
            cases[:1] if is_quick else cases[: 5 if name == "seed chain" else 2]
        ):
            for mode in (
                ("chained", "zeros"),
                ("single", "zeros"),
                ("single", "extend"),
            ):
                if mode != ("chained", "zeros") and source != torch.uint8:
                    continue
                size = (160, 210) if name == "seed chain" else (67, 93)
                image = random_image((9, 3, *size), source)
                pack = Sampler(plan)(9, size, torch.Generator().manual_seed(1)).to(
                    DEVICE
                )
                expected = apply_plan(
                    plan,
                    to_unit_range(image),
                    pack,
                    resampling=mode[0],
                    outside=mode[1],
                )
                poison = torch.full_like(expected, float("nan"), dtype=dtype)
                del poison  # Its memory is what the result will be written to.
                got = call(
                    PlanKernel(plan),
                    image,
                    pack,
                    dtype=dtype,
                    is_channels_last=last,
                    resampling=mode[0],
                    outside=mode[1],
                )
                torch.cuda.synchronize()
                worst = (got.float() - expected.to(dtype).float()).abs()
                difference = float(torch.where(worst.isnan(), torch.inf, worst).max())
                limit = {torch.float32: 5e-4, torch.float16: 8e-3}.get(dtype, 6e-2)
                row = {
                    "plan": name,
                    "source": str(source),
                    "dtype": str(dtype),
                    "channels_last": last,
                    "mode": mode,
                    "worst": difference,
                    "ok": difference < limit,
                }
                report.append(row)
                flag = "" if row["ok"] else "   <-- TOO LARGE"
                print(
                    f"{name:28} {str(source)[6:]:9} -> {str(dtype)[6:]:9} "
                    f"last={int(last)} {'/'.join(mode):15} {difference:.2e}{flag}"
                )


def check_kornia(report: list[dict[str, Any]]) -> None:
    """Compare with Kornia itself, given the same parameters."""
    try:
        import kornia.augmentation as K
    except ImportError as error:
        print(f"no Kornia here ({error}); not compared")
        return
    from gpuprefetch.augment.fusing import fuse

    mean, std = torch.tensor([0.5, 0.45, 0.4]), torch.tensor([0.25, 0.24, 0.23])
    chains = {
        "seed chain": torch.nn.Sequential(
            K.RandomCrop((128, 128)),
            K.Resize((256, 256)),
            K.RandomRotation(45.0, p=1.0),
            K.RandomGaussianBlur((7, 7), (0.1, 2.0), p=1.0),
        ),
        "resized crop": torch.nn.Sequential(
            K.RandomResizedCrop((224, 224)),
            K.RandomHorizontalFlip(),
            K.Normalize(mean, std),
        ),
        "affine": torch.nn.Sequential(
            K.RandomAffine(30.0, (0.1, 0.1), (0.8, 1.2), 10.0), K.RandomVerticalFlip()
        ),
    }
    for name, chain in chains.items():
        fused = fuse(chain)
        image = random_image((32, 3, 256, 256), torch.uint8)
        params = fused.sample(image.shape, torch.Generator().manual_seed(2))
        expected = image.float() / 255
        for member, one in zip(chain, fused.to_kornia(params), strict=True):
            expected = member(expected, params=one)
        difference = float((fused(image, params=params) - expected).abs().max())
        report.append({"kornia": name, "worst": difference})
        print(f"Kornia, same parameters: {name:15} {difference:.2e}")
        for label, run in (("fused", fused), ("Kornia", chain)):
            source = image if label == "fused" else image.float()
            host, wall = host_time_us(lambda r=run, s=source: r(s))
            report.append(
                {"kornia": name, "run": label, "host_us": host, "wall_us": wall}
            )
            print(f"    {label}: host {host:.0f} us a call, everything {wall:.0f} us")


def host_time_us(run: Callable[[], Any], calls: int = 100) -> tuple[float, float]:
    """Host time to issue one call, and wall time with the device's work."""
    for _ in range(10):
        run()
    torch.cuda.synchronize()
    hosts, walls = [], []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(calls // 5):
            run()
        hosts.append((time.perf_counter() - start) / (calls // 5) * 1e6)
        torch.cuda.synchronize()
        walls.append((time.perf_counter() - start) / (calls // 5) * 1e6)
    return statistics.median(hosts), statistics.median(walls)


def device_time_us(run: Callable[[int], Any], calls: int = 20) -> float:
    """Median time of one call inside a replayed graph of several."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for index in range(4):
            run(index)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for index in range(calls):
            run(index)
    times = []
    for _ in range(8):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / calls * 1e3)
    return statistics.median(times[1:])


def report_time(
    report: list[dict[str, Any]],
    what: str,
    batch: int,
    tile: str,
    micros: float,
    floor: float,
) -> None:
    """One row of the table."""
    ratio = micros / floor
    row = {"what": what, "batch": batch, "tile": tile, "us": micros}
    report.append({**row, "copy_us": floor, "ratio": ratio})
    print(f"{what:22} B={batch:<4} {tile:20} {micros:8.1f} us {ratio:6.2f} x copy")


def time_plan(
    images: list[torch.Tensor], plan: Plan, tile: Tile | None, **over: Any
) -> float:
    """Device time of a plan, microseconds; the numbers are drawn once."""
    batch, _, height, width = images[0].shape
    generator = torch.Generator().manual_seed(3)
    pack = Sampler(plan)(batch, (height, width), generator).to(DEVICE)
    kernel = PlanKernel(plan, tile)
    kept: dict[int, torch.Tensor] = {}  # Two results alive: two places to write to.

    def run(i: int) -> None:
        kept[i % 2] = call(kernel, images[i % len(images)], pack, **over)

    return device_time_us(run)


def time_copy(shape: tuple[int, ...], dtype: torch.dtype) -> float:
    """Device time of copying a tensor, microseconds."""
    sources = [torch.rand(shape, device=DEVICE).to(dtype) for _ in range(2)]
    targets = [torch.empty_like(sources[0]) for _ in range(2)]
    return device_time_us(lambda i: targets[i % 2].copy_(sources[i % 2]))


def timings(report: list[dict[str, Any]], is_quick: bool) -> None:
    """The tables."""
    no_blur = Plan(tuple(s for s in SEED_CHAIN.steps if not isinstance(s, Blur)))
    only_blur = Plan(SEED_CHAIN.steps[3:])
    some_tiles = ("64x32 192 4", "64x64 512 2", "32x32 96 8")
    for batch in (32, 128, 512):
        shape = (batch, 3, 256, 256)
        images = [random_image(shape, torch.uint8) for _ in range(4)]
        floor = time_copy(shape, torch.float32)
        report_time(report, "copy of the output", batch, "", floor, floor)
        rows: list[tuple[str, Plan, str, dict[str, Any]]] = [
            ("chained", SEED_CHAIN, "", {}),
            ("single", SEED_CHAIN, "", {"resampling": "single"}),
        ]
        if batch == 32 or (batch == 128 and not is_quick):
            rows += [("chained", SEED_CHAIN, tile, {}) for tile in TILES]
            single = {"resampling": "single"}
            rows += [("single", SEED_CHAIN, tile, single) for tile in some_tiles]
        if batch == 128:
            rows += [("without the blur", no_blur, "", {})]
            rows += [("blur, normalize", only_blur, "", {})]
        for what, plan, tile, over in rows:
            try:
                micros = time_plan(images, plan, TILES.get(tile), **over)
            except Exception as error:
                print(f"{what:22} B={batch:<4} {tile:20} failed: {error}")
                continue
            report_time(report, what, batch, tile or "default", micros, floor)
    images = [random_image((256, 3, 256, 256), torch.uint8) for _ in range(4)]
    floor = time_copy((256, 3, 224, 224), torch.bfloat16)
    report_time(report, "copy, bf16 224", 256, "", floor, floor)
    for name, tile_ in (
        ("64x32 staged 3200", Tile(min_blocks=4, stage_texels=3200)),
        ("64x32 staged 5000", Tile(min_blocks=4, stage_texels=5000)),
        ("64x32 direct", Tile(min_blocks=4, stage_texels=0)),
        ("32x32 staged 1800", Tile(x=32, min_blocks=4, stage_texels=1800)),
        ("32x32 direct", Tile(x=32, min_blocks=4, stage_texels=0)),
    ):
        for last in (True, False):
            over = {"dtype": torch.bfloat16, "is_channels_last": last}
            micros = time_plan(images, IMAGENET, tile_, **over)
            what = f"imagenet last={int(last)}"
            report_time(report, what, 256, name, micros, floor)


def host_parts(report: list[dict[str, Any]]) -> None:
    """Host time of each part of a call, B=32."""
    sampler, kernel = Sampler(SEED_CHAIN), PlanKernel(SEED_CHAIN)
    image = random_image((32, 3, 256, 256), torch.uint8)
    generator = torch.Generator()
    pack = sampler(32, (256, 256), generator)
    packed = pack.to(DEVICE)

    def ship() -> torch.Tensor:
        pinned = torch.empty_like(pack, pin_memory=True)
        pinned.copy_(pack)
        return pinned.to(DEVICE, non_blocking=True)

    parts: dict[str, Callable[[], Any]] = {
        "sample": lambda: sampler(32, (256, 256), generator),
        "ship the numbers": ship,
        "allocate and launch": lambda: call(kernel, image, packed),
    }
    for name, part in parts.items():
        host, _ = host_time_us(part, 500)
        report.append({"host part": name, "us": host})
        print(f"host: {name:20} {host:6.1f} us")


def main() -> None:
    """Run everything and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("json", type=Path)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    if reason := why_not(DEVICE):
        raise SystemExit(f"the kernel cannot run here: {reason}")
    torch.manual_seed(0)
    report: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(DEVICE),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
        "driver": subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=False,
        ).stdout.strip(),
        "checks": [],
        "kornia": [],
        "timings": [],
        "host": [],
    }
    start = time.perf_counter()
    parts: tuple[tuple[str, Callable[[], None]], ...] = (
        ("checks", lambda: check(report["checks"], arguments.quick)),
        ("timings", lambda: timings(report["timings"], arguments.quick)),
        ("host", lambda: host_parts(report["host"])),
        ("kornia", lambda: check_kornia(report["kornia"])),
    )
    for name, part in parts:
        try:
            part()
        except Exception as error:
            report[f"{name} failed"] = repr(error)
            print(f"{name} failed: {error!r}")
        report[f"{name} seconds"] = time.perf_counter() - start
        arguments.json.write_text(json.dumps(report, indent=1))
    bad = [row for row in report["checks"] if not row["ok"]]
    print(
        f"{len(report['checks'])} checks, {len(bad)} too large; "
        f"{time.perf_counter() - start:.0f} s"
    )


if __name__ == "__main__":
    main()
