"""Does everything that needs two GPUs hold on this machine?

    python -m tests.gpu2.run [--out DIR] [--tests-only | --bench-only]
    python -m tests.gpu2.run --device cpu --tiny

Runs the tests of this folder, then ``benchmarks.ddp`` on one rank and on two, and
writes ``tests/gpu/LAST_RUN_2GPU.json`` and ``benchmarks/results/ddp--*.json``. It is
what ``make gpu2`` calls. Exit status 0: all tests passed, none was skipped, every
promised figure was reached. The second form tries the logic with gloo on a CPU, where
nothing is written but to DIR.
"""

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.gpu import run as one_gpu
from tests.gpu.run import Run

_ROOT = Path(__file__).resolve().parent.parent.parent
_LAST_RUN = _ROOT / "tests" / "gpu" / "LAST_RUN_2GPU.json"
_RESULTS = _ROOT / "benchmarks" / "results"

_TESTS_LIMIT_S = 300.0
_BENCHMARK_LIMIT_S = 90.0  # For each number of ranks.


def run_tests(run: Run, device: str) -> None:
    """Run the tests of this folder in one process; they start those of the ranks."""
    report = run.scratch / "gpu2.jsonl"
    report.touch()
    status = run.call(
        *("-m", "pytest", "tests/gpu2", "-m", "gpu2", "-q", "--tb=short"),
        *("--durations=5", "-p", "no:cacheprovider", "-p", "tests.gpu.reporting"),
        limit_s=_TESTS_LIMIT_S,
        GPUPREFETCH_TEST_REPORT=str(report),
        GPUPREFETCH_GPU2_DEVICE=device,
    )
    events = [json.loads(line) for line in report.read_text().splitlines()]
    one_gpu.add_events(run.outcomes, "gpu2", status, events)
    if device == "cuda":
        for skip in run.outcomes.skips:
            run.outcomes.fail(skip["name"], f"skipped: {skip['reason']}")


def run_benchmarks(run: Run, *, device: str, is_tiny: bool) -> dict[str, Any]:
    """Measure one rank and two, and compare them.

    Returns:
        The report of ``benchmarks.ddp``, or what is known of its failure.
    """
    parts = [run.scratch / f"ddp-{num_ranks}.json" for num_ranks in (1, 2)]
    tiny = ("--tiny",) if is_tiny else ()
    for num_ranks, part in zip((1, 2), parts, strict=True):
        status = run.call(
            *("-m", "torch.distributed.run", "--standalone"),
            *(f"--nproc_per_node={num_ranks}", "-m", "benchmarks.ddp"),
            *("--out", str(part), "--device", device, *tiny),
            limit_s=_BENCHMARK_LIMIT_S,
            # NVLink multicast can put the GPUs of a shared host out of service.
            NCCL_NVLS_ENABLE="0",
            OMP_NUM_THREADS="1",  # As torchrun sets it for more than one rank.
        )
        if status != 0:
            run.outcomes.fail(f"ddp on {num_ranks}", f"exit status {status}")
    report = run.scratch / "ddp.json"
    if all(part.exists() for part in parts):
        run.call(
            *("-m", "benchmarks.ddp", "--out", str(report)),
            *("--join", *map(str, parts), *tiny),
            limit_s=60,
        )
    if not report.exists():
        return {"errors": {"ddp": "no report; see the log"}, "figures": []}
    loaded: dict[str, Any] = json.loads(report.read_text())
    return loaded


def record(
    run: Run, machine: dict[str, Any], bench: dict[str, Any] | None
) -> dict[str, Any]:
    """Build what LAST_RUN_2GPU.json holds."""
    outcomes = run.outcomes
    slowest = sorted(outcomes.slowest, reverse=True)[:8]
    return {
        **machine,
        "seconds": round(run.seconds, 1),
        "passed": len(outcomes.passed),
        "failed": len(outcomes.failures),
        "skipped": len(outcomes.skips),
        "tests": sorted(outcomes.passed),
        "failures": outcomes.failures,
        "skips": outcomes.skips,
        "slowest": [{"name": n, "seconds": round(s, 1)} for s, n in slowest],
        "figures": [] if bench is None else bench["figures"],
        "errors": {} if bench is None else bench.get("errors", {}),
    }


def is_good(found: dict[str, Any]) -> bool:
    """Tell whether all passed that was run, and something was."""
    figures_hold = all(figure["passed"] is not False for figure in found["figures"])
    return (
        found["failed"] == 0
        and not found["errors"]
        and figures_hold
        and (found["passed"] > 0 or bool(found["figures"]))
    )


def summarize(run: Run, found: dict[str, Any]) -> None:
    """Say what was wrong, and how much was right."""
    for failure in found["failures"]:
        run.say(f"FAILED {failure['name']}")
        for line in failure["text"].splitlines()[-12:]:
            run.say(f"    {line}")
    for figure in found["figures"]:
        if figure["passed"] is not None:
            verdict = "ok" if figure["passed"] else "MISSED"
            target = f"target {figure['at_least']}"
            run.say(f"{verdict:7s}{figure['name']}: {figure['value']} ({target})")
    for name, reason in found["errors"].items():
        run.say(f"NOT MEASURED {name}: {reason}")
    run.say(
        f"{found['passed']} passed, {found['failed']} failed, {found['skipped']} "
        f"skipped in {found['seconds']} s on {found.get('num_gpus')} x "
        f"{found.get('gpu')}; commit {found.get('commit')}"
    )


def keep(run: Run, out: Path | None, *, gpu: str | None) -> None:
    """Copy what is worth keeping out of the scratch folder.

    Args:
        run: What was run.
        out: Gets a copy of everything.
        gpu: Name of the GPUs, for the committed records; ``None``: there is no record.
    """
    if gpu is not None:
        shutil.copy(run.scratch / _LAST_RUN.name, _LAST_RUN)
        if (run.scratch / "ddp.json").exists():
            name = f"ddp--{gpu.lower().replace(' ', '-')}-x2.json"
            shutil.copy(run.scratch / "ddp.json", _RESULTS / name)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        for name in (_LAST_RUN.name, "ddp.json", "gpu.log"):
            if (run.scratch / name).exists():
                shutil.copy(run.scratch / name, out)


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="folder that gets record and log")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small measurements")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--tests-only", action="store_true")
    only.add_argument("--bench-only", action="store_true")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        run = Run(Path(scratch), kept_s=0.0)
        machine = one_gpu.describe_machine(run)
        bench: dict[str, Any] | None = None
        try:
            if not options.bench_only:
                run_tests(run, options.device)
            if not options.tests_only:
                bench = run_benchmarks(run, device=options.device, is_tiny=options.tiny)
        finally:
            # Also after Ctrl-C: what is known by then is worth keeping.
            found = record(run, machine, bench)
            (run.scratch / _LAST_RUN.name).write_text(
                json.dumps(found, indent=1) + "\n"
            )
            is_real = options.device == "cuda" and not options.tiny
            has_both = (machine.get("num_gpus") or 0) >= 2
            gpu = str(machine.get("gpu")) if is_real and has_both else None
            keep(run, options.out, gpu=gpu)
            summarize(run, found)
    return 0 if is_good(found) else 1


if __name__ == "__main__":
    sys.exit(main())
