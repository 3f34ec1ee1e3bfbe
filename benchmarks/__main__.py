"""How fast is the loader, against what, and where does it lose?

    python -m benchmarks [SUITE ...] [--out-dir DIR] [--again] [--tiny]

Runs the suites, all of them by default, and writes one record for each:
``<suite>--<gpu>.json``. A suite that has a complete record of this very code on this
machine is skipped, unless ``--again``. Afterwards ``python -m benchmarks.tables
--plots`` brings the pages up to date; ``make bench`` does both.
"""

import argparse
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.machine import describe_machine
from benchmarks.record import Record, Value, read_record, write_record
from benchmarks.suite import Place, Suite, run_suite
from benchmarks.suites import SUITES
from benchmarks.tables import RESULTS

__all__ = ["find_complete", "main", "record_name"]

_SCRATCH = Path("bench-out")
_BUDGET_S = 450.0  # With the part that is running then: eight minutes.
# Code is the same if these are; the commit also changes when results are committed.
_SAME_CODE = ("package_sha256", "benchmarks_sha256", "torch", "gpu")


def record_name(suite: str, machine: Mapping[str, Value]) -> str:
    """Name the file of a record."""
    where = str(machine.get("gpu") or "cpu").lower().replace(" ", "-")
    return f"{suite}--{where}.json"


def find_complete(
    suite: str, machine: Mapping[str, Value], folders: Sequence[Path], *, is_tiny: bool
) -> Path | None:
    """Find a complete record of this suite by this very code on such a machine."""
    for folder in folders:
        path = folder / record_name(suite, machine)
        try:
            record = read_record(path)
        except (OSError, ValueError):
            continue
        is_same = all(record.machine.get(key) == machine.get(key) for key in _SAME_CODE)
        if record.is_complete and is_same and record.is_tiny == is_tiny:
            return path
    return None


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks",
        description=(__doc__ or "").partition("\n")[0],
        epilog="Suites: " + "; ".join(f"{s.name}: {s.title}" for s in SUITES),
    )
    parser.add_argument(
        "suites", nargs="*", metavar="SUITE", help="which to run; default: all"
    )
    parser.add_argument("--out-dir", type=Path, help="where records are written")
    parser.add_argument(
        "--again", action="store_true", help="also what is complete already"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="sizes that only show that the code runs"
    )
    parser.add_argument(
        "--budget-s",
        type=float,
        default=_BUDGET_S,
        metavar="SECONDS",
        help="time for all; what has not begun by then is left to the next run",
    )
    parser.add_argument("--device", type=torch.device, help="default: the accelerator")
    options = parser.parse_args(arguments)
    unknown = set(options.suites) - {suite.name for suite in SUITES}
    if unknown:
        known = ", ".join(suite.name for suite in SUITES)
        parser.error(f"there is no suite {sorted(unknown)}. Choose from: {known}")
    return options


def _default_device() -> torch.device:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator or torch.device("cpu")


def _run(
    suite: Suite, place: Place, machine: Mapping[str, Value], path: Path
) -> Record:
    record = run_suite(suite, place, machine, lambda so_far: write_record(so_far, path))
    verdict = "complete" if record.is_complete else "NOT complete"
    print(f"{suite.name}: {verdict} after {record.seconds:.0f} s: {path}", flush=True)
    return record


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; see the module's docstring.

    Returns:
        1 if a suite did not come to its end, or a promise was missed.
    """
    options = _options(arguments)
    warnings.simplefilter("ignore")  # Kornia's and fork's; figures are what is shown.
    place = Place(options.device or _default_device(), options.tiny)
    is_for_show = place.is_tiny or place.device.type == "cpu"
    folder = options.out_dir or (_SCRATCH if is_for_show else RESULTS)
    if place.device.type == "cpu" and not place.is_tiny:
        print("There is no GPU here: sizes that only show that the code runs.")
        place = Place(place.device, is_tiny=True)
    started = time.monotonic()
    machine = describe_machine()
    records, not_begun = [], []
    for suite in SUITES:
        if options.suites and suite.name not in options.suites:
            continue
        folders = [folder] if is_for_show else [folder, RESULTS]
        done = find_complete(suite.name, machine, folders, is_tiny=place.is_tiny)
        if done is not None and not options.again:
            print(f"{suite.name}: complete already: {done}")
            continue
        left_s = options.budget_s - (time.monotonic() - started)
        if left_s <= 0:
            print(f"{suite.name}: not begun, {options.budget_s:.0f} s were over")
            not_begun.append(suite.name)
            continue
        limited = replace(suite, budget_s=min(suite.budget_s, left_s))
        path = folder / record_name(suite.name, machine)
        records.append(_run(limited, place, machine, path))
    print(f"{time.monotonic() - started:.0f} s in all")
    held = [(one, r) for one in records for r in one.ratios if r.passed is not None]
    for record, ratio in held:
        verdict = "ok" if ratio.passed else "MISSED"
        where = f"{record.suite}, {ratio.name}, B={ratio.batch_size}"
        print(f"{verdict:7s}{where}: {ratio.value:.3g} (target {ratio.at_least:g})")
    is_good = not not_begun and all(one.is_complete for one in records)
    return 0 if is_good and all(ratio.passed for _, ratio in held) else 1


if __name__ == "__main__":
    sys.exit(main())
