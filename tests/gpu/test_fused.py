"""Through the loader on a GPU: the fused chain's pixels, and what it costs the host.

One launch, one copy of numbers, and no waiting per batch are promises, so they are
counted here, with torch's profiler and its synchronization debug mode.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import kornia.augmentation as K
import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.measure import work_on_device
from gpuprefetch import StreamPrefetchLoader
from gpuprefetch.augment import kernel
from gpuprefetch.augment.fusing import fuse
from gpuprefetch.augment.parameters import Parameters
from gpuprefetch.errors import TransformError
from gpuprefetch.seeding import BatchSeeds
from gpuprefetch.workloads import kornia_chain
from tests.gpu.support import CUDA

SIZE = 96


def imagenet_chain() -> nn.Sequential:
    return nn.Sequential(
        K.RandomResizedCrop((64, 64)),
        K.RandomHorizontalFlip(),
        K.Normalize(torch.full((3,), 0.5), torch.full((3,), 0.25)),
    )


def simclr_chain() -> nn.Sequential:
    return nn.Sequential(
        K.RandomResizedCrop((64, 80)),
        K.RandomHorizontalFlip(),
        K.ColorJitter(0.8, 0.8, 0.8, 0.2, p=0.8),
        K.RandomGrayscale(p=0.2),
        K.RandomGaussianBlur((9, 9), (0.1, 2.0)),
        K.Normalize(torch.full((3,), 0.5), torch.full((3,), 0.25)),
        K.RandomErasing(value=0.5),
    )


CHAINS: dict[str, Callable[[], nn.Module]] = {
    "demo": lambda: kornia_chain(SIZE),
    "imagenet": imagenet_chain,
    "simclr": simclr_chain,
}
chains = pytest.mark.parametrize("make", CHAINS.values(), ids=CHAINS)


def batches(count: int, size: int = 8) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shape = (size, 3, SIZE, SIZE)
    return [
        torch.randint(
            0, 256, shape, dtype=torch.uint8, generator=generator
        ).pin_memory()
        for _ in range(count)
    ]


def test_the_kernel_can_run() -> None:
    assert kernel.why_not(torch.device("cuda", torch.cuda.current_device())) == ""


@chains
def test_the_loader_gives_what_fuse_gives_with_the_same_seed(
    make: Callable[[], nn.Module],
) -> None:
    source, fused = batches(5), fuse(make())
    loader = StreamPrefetchLoader(source, make(), device=CUDA, seed=4)
    for index, (came, images) in enumerate(zip(loader, source, strict=True)):
        seed = BatchSeeds.for_epoch(4, 0).of_batch(index)
        generator = torch.Generator().manual_seed(seed)
        assert torch.equal(came, fused(images.to(CUDA), generator=generator))


@chains
def test_the_gpu_gives_the_pixels_of_the_cpu(make: Callable[[], nn.Module]) -> None:
    source = batches(3)
    on_cpu, on_gpu = (
        list(StreamPrefetchLoader(source, make(), device=device, seed=4))
        for device in ("cpu", "cuda")
    )
    for came, expected in zip(on_gpu, on_cpu, strict=True):
        # 1e-4 of the unit range, times the Normalize behind it (1 / 0.2).
        torch.testing.assert_close(came.cpu(), expected, rtol=0, atol=5e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_an_explicit_fuse_runs_in_the_loader(dtype: torch.dtype) -> None:
    fused = fuse(imagenet_chain(), dtype=dtype, memory_format=torch.channels_last)
    (out,) = StreamPrefetchLoader(batches(1), fused, device=CUDA, seed=4)
    (plain,) = StreamPrefetchLoader(batches(1), imagenet_chain(), device=CUDA, seed=4)
    assert out.dtype == dtype
    assert out.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(out.float(), plain, rtol=0.01, atol=0.02)


def profiled(steps: Iterator[torch.Tensor], count: int) -> Counter[str]:
    """Count kernels and copies on the device in some steps."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        for _ in range(count):
            next(steps)
        torch.cuda.synchronize()
    found: Counter[str] = Counter()
    for event in work_on_device(recorded):
        kind = "copy" if event.name.startswith("Memcpy") else "kernel"
        found[kind] += not event.name.startswith("Memset")
        found["ours"] += event.name == "augment"
    return found


@chains
def test_one_launch_and_at_most_one_copy_of_numbers_per_batch(
    make: Callable[[], nn.Module],
) -> None:
    """A jitter's contrast takes one more, for the mean of each image."""
    source, launches = batches(30), 2 if make is simclr_chain else 1
    steps = iter(StreamPrefetchLoader(source, make(), device=CUDA, seed=4))
    for _ in range(5):
        next(steps)
    found = profiled(steps, 10)
    # Each batch: one kernel and one copy of its images. Numbers travel for several.
    assert found["ours"] == found["kernel"] == 10 * launches, found
    assert 10 < found["copy"] <= 20, found


@chains
def test_nothing_waits_for_the_device(make: Callable[[], nn.Module]) -> None:
    source = batches(30)
    steps = iter(StreamPrefetchLoader(source, make(), device=CUDA, seed=4))
    for _ in range(5):
        next(steps)
    torch.cuda.set_sync_debug_mode("error")
    for _ in range(20):
        next(steps)


def test_the_profiler_sees_the_operator_by_name() -> None:
    fused, (images,) = fuse(imagenet_chain()), batches(1)
    fused(images.to(CUDA))
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        fused(images.to(CUDA))
    assert "gpuprefetch::augment" in {event.name for event in recorded.events()}


def test_a_compiled_caller_keeps_the_operator() -> None:
    fused = fuse(imagenet_chain())
    images = batches(1)[0].to(CUDA)
    params = fused.sample(images.shape)
    pack = params.flat.view(len(images), -1).to(CUDA)
    key = fused._pieces()[0].key

    def double(x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        out = torch.ops.gpuprefetch.augment(
            x, numbers, key, torch.float32, False, "chained", "zeros"
        )
        return out * 2

    compiled = torch.compile(double, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(images, pack), fused(images, params=params) * 2)


def rotated_then(*members: nn.Module) -> nn.Sequential:
    blur = K.RandomGaussianBlur((7, 7), (0.1, 2.0))
    return nn.Sequential(K.RandomRotation(30.0), *members, blur)


COLORS: dict[str, Callable[[], nn.Sequential]] = {
    "jitter": lambda: nn.Sequential(K.ColorJitter(0.4, 0.4, 0.4, 0.3, p=0.8)),
    "jitter in order": lambda: rotated_then(
        K.ColorJitter(0.4, 0.4, (0.0, 3.0), 0.5, order=(3, 1, 2, 0))
    ),
    "jitter between": lambda: rotated_then(K.ColorJitter(0.4, 0.4, 0.4, 0.3)),
    "jitter first": lambda: nn.Sequential(
        K.ColorJitter(0.4, 0.4, 0.4, 0.3), *rotated_then()
    ),
    "jitter last": lambda: nn.Sequential(
        *rotated_then(), K.ColorJitter(0.4, 0.4, 0.4, 0.3)
    ),
    "jiggle": lambda: rotated_then(K.ColorJiggle(0.3, 0.4, (0.0, 3.0), 0.5, p=0.8)),
    "grayscale": lambda: rotated_then(K.RandomGrayscale(p=0.5)),
    "erasing": lambda: nn.Sequential(
        *rotated_then(K.RandomErasing(value=0.3)), K.RandomErasing(same_on_batch=True)
    ),
}


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("make", COLORS.values(), ids=COLORS)
def test_colors_are_kornias_with_the_same_numbers(
    make: Callable[[], nn.Sequential], dtype: torch.dtype
) -> None:
    """On images of noise, with grey, black and white stripes."""
    chain, (images,) = make(), batches(1, 16)
    # A jitter's factors multiply what the steps before it are apart.
    atol = 1e-4 if len(chain) == 1 else 3e-4
    images[:, :, 10:20] = images[:, :1, 10:20]
    images[:, :, 30:35], images[:, :, 40:45] = 0, 255
    floats = images.float() / 255
    fused = fuse(chain)
    assert fused.is_fused
    for seed in range(3):
        params = fused.sample(images.shape, torch.Generator().manual_seed(seed))
        expected = floats
        for member, drawn in zip(chain, fused.to_kornia(params), strict=True):
            expected = member(expected, params=drawn)
        given = (images if dtype is torch.uint8 else floats).to(CUDA)
        came = fused(given, params=params)
        torch.testing.assert_close(came.cpu(), expected, rtol=0, atol=atol)
        assert torch.equal(came, fused(given, params=params))


def test_the_mean_is_that_of_the_whole_image() -> None:
    """Also of one with more tiles than threads that add up their sums."""
    chain = nn.Sequential(
        K.Resize((700, 900)), K.ColorJitter(contrast=(0.0, 1e-9)), K.Resize((8, 8))
    )
    (images,) = batches(1)
    expected = chain[0](images.float() / 255)
    weights = torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)
    means = (expected * weights).sum(1).mean((1, 2))
    came = fuse(chain)(images.to(CUDA)).cpu()
    wanted = means[:, None, None, None].expand_as(came)
    torch.testing.assert_close(came, wanted, rtol=0, atol=1e-5)


def test_numbers_are_not_overwritten_while_they_are_copied() -> None:
    """Many batches are enqueued behind a pause; each must keep its own numbers."""
    fused, images = fuse(imagenet_chain()), batches(1)[0].to(CUDA)
    expected = []
    for seed in range(64):
        expected.append(fused(images, generator=torch.Generator().manual_seed(seed)))
        torch.cuda.synchronize()
    torch.cuda._sleep(50_000_000)
    found = [
        fused(images, generator=torch.Generator().manual_seed(seed))
        for seed in range(64)
    ]
    for came, wanted in zip(found, expected, strict=True):
        assert torch.equal(came, wanted)


def test_threads_share_one_fused_module() -> None:
    fused, images = fuse(imagenet_chain()), batches(1)[0].to(CUDA)
    draws = [fused.sample(images.shape) for _ in range(4)]
    expected = [fused(images, params=draw) for draw in draws]
    wrong: list[int] = []

    def work(index: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                came = fused(images, params=draws[index])
            torch.cuda.current_stream().synchronize()
            if not torch.equal(came, expected[index]):
                wrong.append(index)

    torch.cuda.synchronize()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert wrong == []


def test_numbers_that_would_be_repeated_are_not_captured() -> None:
    fused, images = fuse(imagenet_chain()), batches(1)[0].to(CUDA)
    params = fused.sample(images.shape)
    expected = fused(images, params=params)

    def capture(given: Parameters | None) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = images.clone()  # Torch warns of an empty graph.
            return graph, fused(kept, params=given)

    for given in (None, params):
        with pytest.raises(TransformError, match="a CUDA graph cannot hold them"):
            capture(given)
    graph, out = capture(replace(params, flat=params.flat.to(CUDA)))
    graph.replay()
    assert torch.equal(out, expected)
