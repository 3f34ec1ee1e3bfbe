"""Do the loops that are compared train on the same batches as the plain loop?

A comparison is fair only if all of them do the work. Streams need a GPU; the order of
things, and what is trained on, does not.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from benchmarks import pipelines, seed
from benchmarks.chains import (
    AsFunction,
    kornia_function,
    own_methods_chain,
    own_subclasses_chain,
    per_sample,
)
from benchmarks.loops import Loop, Over, Step, no_step
from benchmarks.measure import probe_loop
from benchmarks.pipelines import Pair
from benchmarks.suite import Place
from benchmarks.suites.shared import ClassificationStep, LastingStep
from benchmarks.suites.transform import in_torch_operations
from benchmarks.utilization import UtilizationSampler, watch_utilization
from gpuprefetch import workloads
from gpuprefetch.augment.eligible import describe
from gpuprefetch.augment.fusing import fuse

CPU = torch.device("cpu")

pytestmark = pytest.mark.filterwarnings("ignore")  # Kornia's own.


def numbered() -> Iterator[Pair]:
    """Batches whose pixels and labels are their number."""
    for number in itertools.count():
        images = torch.full((2, 3, 4, 4), number, dtype=torch.uint8)
        yield images, torch.full((2, 1), number)


def plus_half(images: torch.Tensor) -> torch.Tensor:
    return images.float() + 0.5


Start = Callable[[Step], Loop]

LOOPS: dict[str, Start] = {
    "plain": lambda step: Over(pipelines.plain(numbered(), CPU, plus_half), step),
    "one ahead": lambda step: Over(
        pipelines.one_ahead(numbered(), CPU, plus_half), step
    ),
    "thread": lambda step: Over(pipelines.threaded(numbered(), CPU, plus_half), step),
    "ours": lambda step: Over(
        pipelines.stream_prefetch(numbered(), CPU, plus_half), step
    ),
    "two streams": lambda step: seed.TwoStreamLoop(numbered(), plus_half, step, CPU),
    "encoder and decoder": lambda step: seed.EncoderDecoderLoop(
        numbered(), plus_half, step, CPU
    ),
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_trains_on_every_batch_with_its_own_labels(name: str) -> None:
    seen: list[tuple[float, int]] = []

    def step(inputs: torch.Tensor, labels: torch.Tensor) -> None:
        seen.append((inputs.unique().item(), int(labels.unique().item())))

    loop = LOOPS[name](step)
    for _ in range(5):
        loop.advance()
    loop.close()
    # The loops of two streams are one batch behind: so they are written.
    expected = 4 if name in ("two streams", "encoder and decoder") else 5
    assert seen == [(number + 0.5, number) for number in range(expected)]


def test_an_error_in_the_background_thread_reaches_the_loop() -> None:
    def broken() -> Iterator[Pair]:
        yield next(numbered())
        raise OSError("the disk is gone")

    batches = pipelines.threaded(broken(), CPU, plus_half)
    next(batches)
    with pytest.raises(OSError, match="the disk is gone"):
        next(batches)


@pytest.mark.parametrize("name", ["thread", "ours", "two streams"])
def test_a_loop_that_is_closed_leaves_no_thread(name: str) -> None:
    before = threading.active_count()
    loop = LOOPS[name](no_step)
    loop.advance()
    loop.close()
    assert threading.active_count() == before


def test_a_step_does_not_change_weights_and_resets_what_is_no_number() -> None:
    step = LastingStep(nn.Linear(3, 2))
    before = [weight.clone() for weight in step._weights]
    step(torch.ones(4, 3), torch.zeros(4, dtype=torch.int64))
    torch.testing.assert_close(step._weights, before, rtol=0, atol=0)
    step(torch.full((4, 3), float("nan")), torch.zeros(4, dtype=torch.int64))
    assert step._weights[0].isnan().any()
    step.reset()
    torch.testing.assert_close(step._weights, before, rtol=0, atol=0)


def test_labels_of_both_shapes_are_trained_on() -> None:
    step = ClassificationStep(16, CPU)
    for shape in ((2,), (2, 1)):
        step(torch.rand(2, 3, 16, 16), torch.zeros(shape, dtype=torch.int64))


# Chains #


@pytest.mark.parametrize("build", [own_subclasses_chain, own_methods_chain])
def test_own_subclasses_do_not_fuse_and_draw_what_the_chain_draws(
    build: Callable[[int], nn.Sequential],
) -> None:
    own = build(16)
    assert describe(own).startswith("not fused")
    assert describe(workloads.kornia_chain(16)) == "fused"
    images = torch.rand(2, 3, 16, 16)
    results = []
    for chain in (own, workloads.kornia_chain(16)):
        torch.manual_seed(3)
        results.append(chain(images))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


def test_a_chain_in_a_function_is_hidden_from_the_loader() -> None:
    function = kornia_function(16)
    assert not isinstance(function, nn.Module)
    images = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
    result = AsFunction(nn.Identity())(images)
    torch.testing.assert_close(result, images.float() / 255)


def test_per_sample_draws_for_each_image() -> None:
    calls: list[torch.Size] = []

    def chain(image: torch.Tensor) -> torch.Tensor:
        calls.append(image.shape)
        return image + len(calls)

    result = per_sample(chain, torch.zeros(3, 1, 2, 2))  # type: ignore[arg-type]
    assert calls == [torch.Size((1, 2, 2))] * 3
    assert result[:, 0, 0, 0].tolist() == [1.0, 2.0, 3.0]


def test_torch_operations_make_the_fused_pixels() -> None:
    fused = fuse(workloads.kornia_chain(16))
    images = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
    results = []
    for transform in (fused, in_torch_operations(fused)):
        torch.manual_seed(5)
        results.append(transform(images))
    torch.testing.assert_close(results[0], results[1])


def test_the_decoder_fits_the_encoder_and_gives_a_score_for_each_pixel() -> None:
    encoder, decoder = seed.build_encoder(), seed.build_decoder()
    images, mask = seed.ImagesAndMasks(64)[0]
    with torch.no_grad():
        features = encoder(images[None].float())
    assert not encoder.training
    assert not any(weight.requires_grad for weight in encoder.parameters())
    scores = decoder(features)
    assert scores.shape == (1, pipelines.NUM_CLASSES, *mask.shape)
    assert mask.dtype == torch.int64


def test_the_seeds_images_are_drawn_anew_and_may_be_augmented_in_the_worker() -> None:
    plain = seed.ImagesAndLabels(16)
    first, label = plain[0]
    assert (first.dtype, first.shape, label.shape) == (torch.uint8, (3, 16, 16), (1,))
    assert not torch.equal(first, plain[0][0])
    chain = workloads.worker_chain(16, scale=False)
    augmented, _ = seed.ImagesAndLabels(16, chain)[0]
    assert augmented.dtype == torch.float32
    assert augmented.max() > 1.0  # The seed does not scale.


# Measuring #


def test_waiting_is_not_counted_as_time_of_the_host() -> None:
    def slow() -> Iterator[Pair]:
        for pair in numbered():
            time.sleep(0.01)
            yield pair

    probe = probe_loop(lambda step: Over(slow(), step), CPU)
    assert probe.host_ms < 5.0
    assert probe.launches is None


def test_the_sampler_averages_what_it_read_between_two_times() -> None:
    readings = iter([10.0, 20.0, 60.0])
    has_read = threading.Event()

    def read() -> float:
        try:
            return next(readings)
        except StopIteration:
            has_read.set()
            return 1000.0

    started = time.perf_counter()
    sampler = UtilizationSampler(read, period_s=0.001)
    assert has_read.wait(10.0)
    sampler.close()
    times = [when for when, _ in sampler._readings]
    assert sampler.between(started, times[2]) == 30.0
    assert sampler.between(times[1], times[2]) == 40.0
    assert sampler.between(0.0, started) is None
    assert not sampler._thread.is_alive()


def test_without_a_gpu_there_is_no_utilization() -> None:
    with watch_utilization(Place(CPU)) as sampler:
        assert sampler is None
