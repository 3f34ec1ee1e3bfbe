"""Do copy and augmentation of the next batch run beside the training step?

    python -m benchmarks.overlap --out-dir DIR [--tiny]

The suite ``overlap`` by itself, with everything in one folder: the record, and for the
loader and for the plain loop the trace, the figures batch by batch, and a picture.
"""

import argparse
import json
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.__main__ import record_name
from benchmarks.machine import describe_machine
from benchmarks.record import write_record
from benchmarks.suite import Place, run_suite
from benchmarks.suites.overlap import NAMES, SUITE, draw, measure

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line; see the module's docstring.

    Returns:
        1 if something could not be recorded.
    """
    parser = argparse.ArgumentParser(
        prog="benchmarks.overlap", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--out-dir", type=Path, required=True, help="made if missing")
    parser.add_argument(
        "--tiny", action="store_true", help="sizes that only show that the code runs"
    )
    parser.add_argument("--device", type=torch.device, help="default: the accelerator")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")  # Kornia's own, and the profiler's.
    device = options.device or (
        torch.accelerator.current_accelerator(check_available=True)
        or torch.device("cpu")
    )
    is_tiny = options.tiny or device.type != "cuda"
    suite = replace(SUITE, run=lambda run: measure(run, options.out_dir))
    machine = describe_machine()
    path = options.out_dir / record_name("overlap", machine)
    place = Place(device, is_tiny)
    record = run_suite(suite, place, machine, lambda so_far: write_record(so_far, path))
    for case in record.cases:
        print(json.dumps({"name": case.name, **case.extra}))
    if device.type == "cuda":
        for pipeline in NAMES:
            picture = options.out_dir / f"timeline-{pipeline}.png"
            draw(options.out_dir, pipeline, picture)
    return 0 if record.is_complete else 1


if __name__ == "__main__":
    sys.exit(main())
