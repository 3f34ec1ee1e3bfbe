"""What does ``python -m gpuprefetch probe`` show?

Whether the loader helps a training loop: the gain that its parts alone let expect, the
gain that was measured, and what limits the rest.
"""

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from gpuprefetch.batch import leaves_of
from gpuprefetch.cli.arguments import at_least, available_device
from gpuprefetch.cli.objects import (
    CommandError,
    load_loader,
    load_step,
    load_transform,
    running_user_code,
)
from gpuprefetch.cli.table import format_table
from gpuprefetch.errors import SelectionError
from gpuprefetch.plural import counted
from gpuprefetch.probe import Effort, Probe, probe
from gpuprefetch.settings import resolve_device

__all__ = [
    "add_effort",
    "add_to",
    "effort_of",
    "format_probe",
    "parse_inputs",
    "show_probe",
]

_DESCRIPTION = """\
Measures your training loop as it is and behind StreamPrefetchLoader, in turns, and says
whether it helps. LOADER is a DataLoader, or a function that makes one. STEP is called
with each batch on the device (or with its items, if it takes several). T is what you
would pass as transform=; without the loader it runs in the loop."""

_EXAMPLES = """\
examples:
  python -m gpuprefetch probe train:make_loader --step train:train_step
      with train.py in this folder
  python -m gpuprefetch probe scripts/train.py:loader --step scripts/train.py:step \\
      --transform scripts/train.py:augment
      files, and an augmentation
  python -m gpuprefetch probe train:loader --step train:step --json > probe.json
      for a program to read

exit codes: 0 measured, whatever came out; 2 it could not be measured; 130 Ctrl-C
"""

_ANSWERS = {
    "helps": "It helps.",
    "does not help": "It does not help here: the difference is too small to show.",
    "slower": "It does not help here: the plain loop is faster. Keep that.",
    "cannot tell": "Cannot tell: the runs differ too much. Measure again with more "
    "--batches and --rounds, on a machine that does nothing else.",
}


def add_to(commands: Any) -> None:
    """Add the command and its options to argparse's sub-parsers."""
    parser = commands.add_parser(
        "probe",
        help="measure whether the loader helps your training loop",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("loader", metavar="MODULE:LOADER", help="the source")
    parser.add_argument(
        "--step", required=True, metavar="MODULE:STEP", help="one training step"
    )
    parser.add_argument(
        "--transform", metavar="MODULE:T", help="what runs on the device before it"
    )
    parser.add_argument(
        "--inputs",
        metavar="NAME",
        help="index or key of what the transform gets, as inputs=; several with commas "
        "(default: the first)",
    )
    add_effort(parser)
    parser.set_defaults(command=_run)


def add_effort(parser: argparse.ArgumentParser) -> None:
    """Add the options that say where and how long, and how to print."""
    parser.add_argument(
        "--device",
        type=available_device,
        help="where to train (default: the accelerator if there is one)",
    )
    parser.add_argument(
        "--batches",
        type=at_least(1),
        metavar="N",
        help="batches on the clock in each round (default: what fits in 40 s in all)",
    )
    parser.add_argument(
        "--rounds",
        type=at_least(1),
        default=Effort().rounds,
        metavar="N",
        help="turns of each loop; fewer than 6 give no answer (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead")


def effort_of(options: argparse.Namespace) -> Effort:
    """Read what :func:`add_effort` added."""
    return Effort(rounds=options.rounds, batches=options.batches)


def _run(options: argparse.Namespace) -> int:
    # What the user's code prints must not get into a result that a program reads.
    with contextlib.redirect_stdout(sys.stderr):
        result = _measure(options)
    show_probe(result, as_json=options.json)
    return 0


def _measure(options: argparse.Namespace) -> Probe:
    source = load_loader(options.loader)
    step = load_step(options.step)
    transform = options.transform and load_transform(options.transform)
    if transform is None:
        step = _hinting_at_transform(step)
    if sys.stderr.isatty():
        print("measuring: about a minute", file=sys.stderr)
    with _naming_the_option(options), running_user_code("the training loop failed"):
        return probe(
            source,
            step,
            transform,
            inputs=parse_inputs(options.inputs),
            device=resolve_device(options.device),
            effort=effort_of(options),
        )


def _hinting_at_transform(step: Callable[[Any], object]) -> Callable[[Any], object]:
    """Say at a step's error over uint8 images what makes them floats."""

    def call(batch: Any) -> object:
        try:
            return step(batch)
        except (TypeError, RuntimeError) as error:
            if _holds_bytes(batch):
                error.add_note(
                    "The step gets uint8 images, as the loader makes them. If "
                    "something makes them floats before, name it with --transform."
                )
            raise

    return call


def _holds_bytes(batch: Any) -> bool:
    tensors = [leaf for leaf in leaves_of(batch) if isinstance(leaf, torch.Tensor)]
    return any(tensor.dtype == torch.uint8 for tensor in tensors)


@contextlib.contextmanager
def _naming_the_option(options: argparse.Namespace) -> Iterator[None]:
    """Add to an error about ``inputs=`` how the command line spells it."""
    try:
        yield
    except SelectionError as error:
        raise CommandError(
            f"{error} Here that is --inputs x, or --inputs x,y for two of them; there "
            "is no batch_transform=."
        ) from error


def parse_inputs(words: str | None) -> str | int | tuple[str | int, ...] | None:
    """Read what ``inputs=`` would be: a key, an index, or a tuple of them."""
    if words is None:
        return None
    names = tuple(map(_parse_input, words.split(",")))
    return names if len(names) > 1 else names[0]


def _parse_input(word: str) -> str | int:
    try:
        return int(word)
    except ValueError:
        return word


def show_probe(result: Probe, *, as_json: bool) -> None:
    """Print a result."""
    print(json.dumps(result.as_dict(), indent=1) if as_json else format_probe(result))


def format_probe(result: Probe) -> str:
    """Write a result for people."""
    rows = [
        ("loader alone", result.loader_ms),
        ("step alone", result.step_ms),
        ("transform alone", result.transform_ms),
        ("plain loop", result.plain_ms),
        ("with StreamPrefetchLoader", result.ours_ms),
    ]
    table = format_table(
        ("median of the rounds", "ms a batch", "batches/s"),
        [
            (name, f"{ms:.2f}", f"{1e3 / max(ms, 1e-9):.1f}")
            for name, ms in rows
            if ms is not None
        ],
    )
    gain = result.gain
    return "\n".join(
        (
            f"{_name(result.device)}, {counted(result.rounds, 'round')} of "
            f"{counted(result.batches, 'batch')}, in turns",
            "",
            table,
            "",
            f"expected: {_expected(result)}",
            f"measured: {gain.median:.2f} x as fast, {gain.low:.2f} to {gain.high:.2f} "
            f"with {gain.confidence:.0%} confidence",
            f"answer:   {_answer(result)}",
            f"verdict:  {result.verdict}. {result.figure}",
            f"next:     {result.advice}",
            *_notes(result),
        )
    )


def _notes(result: Probe) -> list[str]:
    if not result.is_crowded:
        return []
    return [
        f"note:     a whole loop takes {result.slowest_ms:.2f} ms, "
        f"{result.slowest_ms / max(result.alone_ms, 1e-9):.1f} times its parts alone "
        f"({result.alone_ms:.2f} ms): processes and threads seem to compete for the "
        "cores, and answer and verdict may be theirs. Measure again with "
        "OMP_NUM_THREADS=1 in the environment, or on a machine that does nothing else."
    ]


def _answer(result: Probe) -> str:
    if result.gain.is_confident:
        return _ANSWERS[result.gain.answer]
    return (
        f"Cannot tell from {counted(result.rounds, 'round')}: an interval that holds "
        f"the true gain in 95 % of measurements takes {Effort().rounds}. Measure again "
        f"with --rounds {Effort().rounds}."
    )


def _expected(result: Probe) -> str:
    limit = f"the limit is {result.limit}, {result.limit_ms:.2f} ms"
    if result.is_contradicted:
        return (
            f"too noisy to say: a whole loop takes {result.fastest_ms:.2f} ms, less "
            f"than its own limit, {result.limit}, {result.limit_ms:.2f} ms. Measure "
            "again with more --batches"
        )
    gain = result.expected_gain
    if gain is None:
        return (
            f"nothing from overlap: {result.device} does one thing at a time; {limit}"
        )
    most = f"at most {gain:.2f} x as fast" if gain > 1 else "nothing to gain"
    return f"{most}; {limit}"


def _name(device: str) -> str:
    is_cuda = device.startswith("cuda")
    return f"{device} ({torch.cuda.get_device_name(device)})" if is_cuda else device
