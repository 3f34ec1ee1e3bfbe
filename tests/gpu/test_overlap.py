"""Are copy and augmentation of the next batches beside the step, on a real GPU?

Read from a profiler's trace of the very loop that the benchmark ``overlap`` records. A
detector must be shown to detect: the same is asked of the plain loop, where nothing can
be hidden, and found absent.
"""

from pathlib import Path

import pytest

from benchmarks.profiled import (
    DEPTH,
    Pipeline,
    Sizes,
    record_trace,
    start_pipeline,
)
from benchmarks.suites.shared import ClassificationStep
from gpuprefetch.overlap import Overlap, find_overlap
from gpuprefetch.timeline import save_timeline
from gpuprefetch.trace import read_trace
from tests.gpu.support import CUDA

_NUM_STEPS = 20
_SIZES = Sizes(steps=_NUM_STEPS)

# Nine of ten, and not all: a batch is issued when the host is let go on, which is not
# tied to the GPU's place in a step, so one or two of twenty may lie across the border
# between two steps. Then nothing is lost, but it is inside neither.
_NEARLY_ALL = 0.9

# While a copy runs, some kernel of the step should. Between two of them lie a few
# microseconds; steps of this model are about a hundred kernels in 11 ms.
_MOST_OF_THE_TIME = 0.8


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[Pipeline, Path]:
    """One trace of each pipeline, with the same training step."""
    folder = tmp_path_factory.mktemp("traces")
    step = ClassificationStep(_SIZES.image_size, CUDA)
    paths: dict[Pipeline, Path] = {
        "ours": folder / "ours.json.gz",
        "plain": folder / "plain.json.gz",
    }
    for name, path in paths.items():
        batches = start_pipeline(name, _SIZES, CUDA)
        record_trace(batches, step, path, device=CUDA, steps=_NUM_STEPS)
    return paths


def _overlap(path: Path) -> Overlap:
    overlap = find_overlap(read_trace(path), depth=DEPTH)
    print(
        f"{path.name}: {len(overlap.batches)} batches, "
        f"{len(overlap.steady_batches)} of them after the first step began; inside an "
        f"earlier step {overlap.inside_share:.1%}; hidden: copies "
        f"{overlap.copy_hidden_share:.1%}, augmentation "
        f"{overlap.transform_hidden_share:.1%}; GPU idle {overlap.idle_share:.1%}; "
        f"inside {[batch.inside_step for batch in overlap.batches]}"
    )
    return overlap


@pytest.mark.timeout(120)
def test_batches_are_made_ready_within_earlier_steps(
    traces: dict[Pipeline, Path],
) -> None:
    overlap = _overlap(traces["ours"])
    assert overlap.side_stream is not None
    assert overlap.side_stream != overlap.consumer_stream
    # The host is some steps ahead: those were issued before the first step began.
    steady = overlap.steady_batches
    assert len(steady) >= _NUM_STEPS - 2 * (DEPTH + 2)
    for batch in steady:
        assert (
            max(copy.num_bytes for copy in batch.copies)
            == _SIZES.batch_size * 3 * 256 * 256
        )
        assert [kernel.name for kernel in batch.transforms] == ["augment"]
    assert overlap.inside_share >= _NEARLY_ALL
    assert overlap.copy_hidden_share >= _MOST_OF_THE_TIME


@pytest.mark.timeout(120)
def test_a_plain_loop_is_found_to_hide_nothing(traces: dict[Pipeline, Path]) -> None:
    overlap = _overlap(traces["plain"])
    assert overlap.side_stream is None
    assert len(overlap.steady_batches) >= _NUM_STEPS - 2
    for batch in overlap.steady_batches:
        assert batch.copy_us > 0
        assert batch.transform_us > 0
    assert overlap.hidden_share == 0.0
    assert overlap.inside_share == 0.0


@pytest.mark.timeout(120)
def test_the_named_ranges_and_the_order_of_launches_agree(
    traces: dict[Pipeline, Path],
) -> None:
    """Without the ranges the same batches and steps are found."""
    trace = read_trace(traces["ours"])
    named = [one for one in trace.ranges if one.name.startswith("gpuprefetch::")]
    without = type(trace)(
        trace.works,
        tuple(one for one in trace.ranges if one not in named),
        trace.thread_names,
    )
    found, expected = (find_overlap(one, depth=DEPTH) for one in (without, trace))
    assert found.side_stream == expected.side_stream
    assert len(found.batches) == len(expected.batches)
    assert found.inside_share == expected.inside_share
    assert found.copy_hidden_share == pytest.approx(expected.copy_hidden_share)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["ours", "plain"])
def test_the_trace_is_drawn(
    name: Pipeline, traces: dict[Pipeline, Path], tmp_path: Path
) -> None:
    trace = read_trace(traces[name])
    picture = tmp_path / "timeline.png"
    save_timeline(trace, find_overlap(trace, depth=DEPTH), picture)
    assert picture.stat().st_size > 20_000
