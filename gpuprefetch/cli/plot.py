"""What does ``python -m gpuprefetch plot`` show?

A few steps of a profiler's trace as a picture, and in words how much of the work on the
next batches ran beside them.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

from gpuprefetch.cli.arguments import at_least
from gpuprefetch.overlap import Overlap, find_overlap
from gpuprefetch.timeline import save_timeline
from gpuprefetch.trace import read_trace

__all__ = ["add_to"]

# Wrapped here: the formatter that keeps the examples' lines keeps these, too.
_DESCRIPTION = """\
Draws what the CPU's threads and the GPU's streams did in a few training steps, from a
trace that torch.profiler wrote, and says how much of the copies and of the augmentation
ran beside the training. Also for loops without this package's loader."""

_EXAMPLES = """\
examples:
  python -m gpuprefetch plot trace.json --out timeline.png
      four steps from the middle of the trace
  python -m gpuprefetch plot trace.json.gz --steps 2 --first 10
      steps 10 and 11; timeline.png is the default

how to record a trace of twenty steps:
  from torch.profiler import profile, schedule

  with profile(
      schedule=schedule(wait=10, warmup=5, active=20, repeat=1),
      on_trace_ready=lambda p: p.export_chrome_trace("trace.json.gz"),
  ) as profiler:
      for x, y in loader:
          train(x, y)
          profiler.step()
"""


def add_to(commands: Any) -> None:
    """Add the command and its options to argparse's sub-parsers."""
    parser = commands.add_parser(
        "plot",
        help="draw a profiler's trace: what ran beside what",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "trace",
        type=Path,
        metavar="TRACE",
        help="file of profiler.export_chrome_trace: .json or .json.gz",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("timeline.png"),
        metavar="FILE",
        help="picture to write, .png, .svg or .pdf (default: %(default)s)",
    )
    parser.add_argument(
        "--steps",
        type=at_least(1),
        default=4,
        metavar="N",
        help="training steps to show (default: %(default)s)",
    )
    parser.add_argument(
        "--first",
        type=at_least(0),
        metavar="N",
        help="first of them, counted from 0 (default: the middle of the trace)",
    )
    parser.add_argument(
        "--depth",
        type=at_least(1),
        default=2,
        metavar="N",
        help="the loader's depth, which pairs batches with steps where the trace "
        "begins in the middle of a pass (default: %(default)s)",
    )
    parser.set_defaults(command=_run)


def _run(options: argparse.Namespace) -> int:
    trace = read_trace(options.trace)
    overlap = find_overlap(trace, depth=options.depth)
    save_timeline(
        trace,
        overlap,
        options.out,
        num_steps=options.steps,
        first_step=options.first,
    )
    print(_describe(overlap))
    print(f"\nThe picture: {options.out}")
    return 0


def _describe(overlap: Overlap) -> str:
    starts_us = [step.start_us for step in overlap.steps]
    lines = [f"training steps   {len(overlap.steps)}"]
    if len(starts_us) > 1:
        every_us = (starts_us[-1] - starts_us[0]) / (len(starts_us) - 1)
        lines[0] += f", one every {every_us / 1e3:.2f} ms"
    lines.append(f"GPU standing by  {overlap.idle_share:.1%} of the time")
    if not overlap.batches:
        return "\n".join([*lines, "batches          no copy to the GPU in this trace"])
    copy_us = statistics.median(batch.copy_us for batch in overlap.batches)
    transform_us = statistics.median(batch.transform_us for batch in overlap.batches)
    lines.append(
        f"copies           {copy_us:.0f} us a batch, "
        f"{overlap.copy_hidden_share:.0%} of it while training kernels ran"
    )
    if transform_us:
        lines.append(
            f"augmentation     {transform_us:.0f} us a batch, "
            f"{overlap.transform_hidden_share:.0%} of it while training kernels ran"
        )
    steady = overlap.steady_batches
    inside = sum(batch.is_inside_earlier_step for batch in steady)
    lines.append(
        f"batches          {inside} of {len(steady)} were made ready within "
        "the step of an earlier one"
    )
    return "\n".join([*lines, _where(overlap)])


def _where(overlap: Overlap) -> str:
    consumer = f"stream {overlap.consumer_stream}"
    if overlap.side_stream is None:
        return f"streams          all of it on {consumer}, one after the other"
    return (
        f"streams          batches on stream {overlap.side_stream}, training on "
        f"{consumer}"
    )
