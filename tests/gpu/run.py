"""Does everything that needs a GPU hold on this machine?

    python tests/gpu/run.py [--out DIR] [--tests-only | --bench-only]

Runs the GPU tests, then the benchmarks, and writes ``tests/gpu/LAST_RUN.json``. It is
what ``make gpu`` calls. Exit status 0: all tests passed, none was skipped that should
have run, every promised figure was reached.

Each file of tests runs in a process of its own with a limit on its time, so that a hang
or a spoilt CUDA context costs that file only. Where ``.git`` is missing, the commit is
taken from GPUPREFETCH_COMMIT, and GPUPREFETCH_DIRTY says whether that is all.
"""

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

_HERE = Path(__file__).resolve().parent
_ROOT = _HERE.parent.parent
_LAST_RUN = _HERE / "LAST_RUN.json"

# Skips that are no failure even where CUDA is required, by a part of their reason.
_ALLOWED_SKIPS = ("needs two CUDA devices",)

_TOTAL_BUDGET_S = float(os.environ.get("GPUPREFETCH_GPU_BUDGET_S", "510"))
# Kept free for the benchmarks while tests run.
_BENCHMARK_SHARE_S = min(240.0, 0.25 * _TOTAL_BUDGET_S)
_FILE_LIMIT_S = 120.0
_REST_LIMIT_S = 240.0

# Python 3.12 warns when a process with threads forks workers. CUDA has threads.
_FORK_WARNING = "ignore:This process:DeprecationWarning"

_PROMISES = ("must_reach", "fused")
"""The benchmarks that have targets."""

# These watch the order of events on the GPU, or times: nothing else runs beside them.
_ALONE = {
    "handoff": "tests/gpu/test_handoff.py",
    "sync": "tests/gpu/test_sync.py",
    "overlap": "tests/gpu/test_overlap.py",
    "statistics": "tests/gpu/test_statistics.py",
    "diagnosis": "tests/test_examples_diagnosis.py",
}

_REST = "rest"
"""All GPU tests that are in none of the files that run alone."""

_MOST_ATTEMPTS = 3
_NOTHING_SELECTED = 5  # Exit status of pytest.


@dataclass(slots=True)
class Outcomes:
    """What became of the tests of one or more pytest processes."""

    passed: list[str] = field(default_factory=list)
    failures: list[dict[str, str]] = field(default_factory=list)
    skips: list[dict[str, str]] = field(default_factory=list)
    slowest: list[tuple[float, str]] = field(default_factory=list)

    def fail(self, name: str, text: str) -> None:
        """Note a failure."""
        self.failures.append({"name": name, "text": text})


class Run:
    """One run of everything: its clock, its log, its results.

    Args:
        scratch: Folder for reports of the single processes.
        kept_s: Seconds that tests leave to the benchmarks.
    """

    def __init__(self, scratch: Path, kept_s: float) -> None:
        self.scratch = scratch
        self._kept_s = kept_s
        self.log_path = scratch / "gpu.log"
        self.outcomes = Outcomes()
        self._started = time.monotonic()
        self._log: TextIO = self.log_path.open("w")

    @property
    def seconds(self) -> float:
        """Time since the start."""
        return time.monotonic() - self._started

    @property
    def seconds_left(self) -> float:
        """Time until this run should have ended."""
        return _TOTAL_BUDGET_S - self.seconds

    def say(self, text: str) -> None:
        """Print a line and log it."""
        print(text, flush=True)
        self._log.write(text + "\n")
        self._log.flush()

    @property
    def seconds_for_tests(self) -> float:
        """Of those, what tests may take."""
        return self.seconds_left - self._kept_s

    def call(self, *arguments: str, limit_s: float, **environment: str) -> int | None:
        """Run Python with these arguments, its output going on as it comes.

        Returns:
            The exit status; ``None`` when the time was up and it was killed.
        """
        self.say(f"--- {self.seconds:5.0f} s  python {' '.join(arguments)}")
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=_ROOT,
            env={**_environment(), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        # In a thread, since the pipe stays open for as long as any grandchild lives.
        reader = threading.Thread(target=self._relay, args=(process.stdout,))
        reader.daemon = True
        reader.start()
        try:
            status: int | None = process.wait(timeout=max(limit_s, 1.0))
        except subprocess.TimeoutExpired:
            status = None
        _kill_group(process.pid)
        process.wait()
        reader.join(timeout=5.0)
        if status is None:
            self.say(f"killed after {limit_s:.0f} s")
        return status

    def _relay(self, pipe: TextIO) -> None:
        for line in pipe:
            self.say(line.rstrip("\n"))


def _environment() -> dict[str, str]:
    path = [str(_ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(part for part in path if part),
        "PYTHONUNBUFFERED": "1",
        "GPUPREFETCH_REQUIRE_CUDA": "1",
    }


def _kill_group(group: int) -> None:
    """End what a process left behind: workers of a killed test, for example."""
    try:
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


# Tests #


def run_tests(run: Run, parts: Collection[str]) -> None:
    """Run each file of GPU tests, then the GPU's share of all other tests."""
    for name, file in _ALONE.items():
        if name in parts:
            _run_pytest(run, name, _FILE_LIMIT_S, file)
    if _REST not in parts:
        return
    # Values, types, lifetimes and the process's own memory: another process on the GPU
    # does not disturb them.
    has_xdist = importlib.util.find_spec("xdist") is not None
    side_by_side = ("-n", "12", "-p", "no:benchmark") if has_xdist else ()
    _run_pytest(
        *(run, _REST, _REST_LIMIT_S, "tests", *side_by_side),
        *(f"--ignore={file}" for file in _ALONE.values()),
    )


def _run_pytest(run: Run, name: str, limit_s: float, *selection: str) -> None:
    """Run a selection; after a hang or a crash go on with the tests behind it."""
    begun: list[str] = []
    for attempt in range(_MOST_ATTEMPTS):
        left_s = run.seconds_for_tests
        if left_s < 10:
            run.outcomes.fail(name, f"not begun: {run.seconds:.0f} s are over")
            return
        report = run.scratch / f"{name}-{attempt}.jsonl"
        report.touch()
        status = run.call(
            *("-m", "pytest", *selection, "-m", "gpu", "-q", "--tb=short"),
            *("--durations=3", "-p", "no:cacheprovider", "-p", "tests.gpu.reporting"),
            *("-W", _FORK_WARNING),
            *(f"--deselect={test}" for test in begun),
            limit_s=min(limit_s, left_s),
            GPUPREFETCH_TEST_REPORT=str(report),
        )
        if attempt > 0 and status == _NOTHING_SELECTED:
            return
        events = [json.loads(line) for line in report.read_text().splitlines()]
        is_cut_off = add_events(run.outcomes, name, status, events)
        if not is_cut_off:
            return
        begun += [event["name"] for event in events if event["event"] == "start"]


def add_events(
    outcomes: Outcomes, name: str, status: int | None, events: list[dict[str, Any]]
) -> bool:
    """Note what one process wrote; see ``reporting.py``.

    Returns:
        Whether the process ended in the middle of a test.
    """
    running: str | None = None
    bad: dict[str, str] = {}
    skipped: dict[str, str] = {}
    seconds: dict[str, float] = {}
    for event in events:
        test = event["name"]
        if event["event"] == "start":
            running = test
        elif event["event"] == "finish":
            running = None
        elif event["outcome"] == "failed":
            bad[test] = bad.get(test, "") + event["text"]
        elif event["outcome"] == "skipped":
            skipped[test] = event["text"]
        seconds[test] = seconds.get(test, 0.0) + event.get("seconds", 0.0)
    if running is not None:
        bad[running] = f"never finished; exit status of pytest: {status}"
    elif status not in (0, 1):
        bad[f"pytest: {name}"] = f"exit status {status}; see the log"
    for test, reason in skipped.items():
        is_allowed = any(allowed in reason for allowed in _ALLOWED_SKIPS)
        if test not in bad and not is_allowed:
            bad[test] = f"skipped where nothing may be: {reason}"
        outcomes.skips.append({"name": test, "reason": reason})
    for test, text in bad.items():
        outcomes.fail(test, text)
    outcomes.passed += [test for test in seconds if test not in {**bad, **skipped}]
    outcomes.slowest += [(spent, test) for test, spent in seconds.items()]
    return running is not None


# Benchmarks #


def run_benchmarks(run: Run) -> dict[str, Any]:
    """Measure what was promised.

    Returns:
        Of all benchmarks of promises together: figures, and errors by measurement.
    """
    figures: list[dict[str, Any]] = []
    errors: dict[str, str] = {}
    for number, name in enumerate(_PROMISES):
        report = run.scratch / f"{name}.json"
        share_s = (run.seconds_left - 15) / (len(_PROMISES) - number)
        # No measurement is begun so late that it would be cut off.
        status = run.call(
            *("-m", f"benchmarks.{name}", "--out", str(report)),
            *("--budget-s", f"{max(share_s - 25, 20):.0f}"),
            *("--rounds", "3" if share_s < 100 else "5"),
            limit_s=share_s,
        )
        if report.exists():
            loaded = json.loads(report.read_text())
            figures += loaded["figures"]
            errors |= loaded["errors"]
        else:
            errors[name] = f"no report; exit status {status}"
    return {"figures": figures, "errors": errors}


# Record #


def describe_machine(run: Run) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.machine"]
    try:
        finished = subprocess.run(
            command,
            cwd=_ROOT,
            env=_environment(),
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        described: dict[str, Any] = json.loads(finished.stdout)
    except (OSError, subprocess.SubprocessError, json.JSONDecodeError) as error:
        details = getattr(error, "stderr", "") or ""
        run.outcomes.fail("machine", f"{error}\n{details[-2000:]}")
        return {}
    return described


def _record(
    run: Run, machine: dict[str, Any], must_reach: dict[str, Any] | None
) -> dict[str, Any]:
    """Build what LAST_RUN.json holds."""
    outcomes = run.outcomes
    record: dict[str, Any] = {
        **machine,
        "seconds": round(run.seconds, 1),
        "passed": len(outcomes.passed),
        "failed": len(outcomes.failures),
        "skipped": len(outcomes.skips),
        "failures": outcomes.failures,
        "skips": outcomes.skips,
        "slowest": [
            {"name": name, "seconds": round(spent, 1)}
            for spent, name in sorted(outcomes.slowest, reverse=True)[:10]
        ],
    }
    if must_reach is not None:
        record["must_reach"] = [
            {
                key: figure[key]
                for key in ("name", "value", "unit", "at_least", "at_most", "passed")
            }
            for figure in must_reach.get("figures", [])
        ]
        record["must_reach_errors"] = must_reach.get("errors", {})
    return record


def _is_good(record: dict[str, Any]) -> bool:
    figures = record.get("must_reach", [])
    return (
        record["failed"] == 0
        and not record.get("must_reach_errors")
        and all(figure["passed"] is not False for figure in figures)
    )


def _summarize(run: Run, record: dict[str, Any]) -> None:
    for failure in record["failures"]:
        run.say(f"FAILED {failure['name']}")
        for line in failure["text"].splitlines()[-8:]:
            run.say(f"    {line}")
    for skip in record["skips"]:
        run.say(f"SKIPPED {skip['name']}: {skip['reason']}")
    for figure in record.get("must_reach", []):
        if figure["passed"] is not None:
            bound = figure["at_least"] or figure["at_most"]
            verdict = "ok" if figure["passed"] else "MISSED"
            value = f"{figure['value']} {figure['unit']}"
            run.say(f"{verdict:7s}{figure['name']}: {value} (target {bound})")
    for name in record.get("must_reach_errors", {}):
        run.say(f"NOT MEASURED {name}")
    run.say(
        f"{record['passed']} passed, {record['failed']} failed, {record['skipped']} "
        f"skipped in {record['seconds']} s on {record.get('gpu')}; commit "
        f"{record.get('commit')}"
    )


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--out", type=Path, help="folder that also gets the record and the whole log"
    )
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--tests-only", action="store_true")
    only.add_argument("--bench-only", action="store_true")
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=[*_ALONE, _REST],
        default=[*_ALONE, _REST],
        metavar="PART",
        help="tests to run, of %(choices)s; the record names them",
    )
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        run = Run(Path(scratch), 0.0 if options.tests_only else _BENCHMARK_SHARE_S)
        must_reach: dict[str, Any] | None = None
        machine = describe_machine(run)
        if not machine.get("gpu"):
            run.say(f"torch sees no CUDA device here: {_LAST_RUN.name} is not written")
        try:
            if not options.bench_only:
                run_tests(run, options.parts)
            if not options.tests_only:
                must_reach = run_benchmarks(run)
        finally:
            # Also after Ctrl-C: what is known by then is worth keeping.
            record = _record(run, machine, must_reach)
            record["parts"] = options.parts
            (run.scratch / _LAST_RUN.name).write_text(
                json.dumps(record, indent=1) + "\n"
            )
            if machine.get("gpu"):
                shutil.copy(run.scratch / _LAST_RUN.name, _LAST_RUN)
            _summarize(run, record)
            if options.out is not None:
                options.out.mkdir(parents=True, exist_ok=True)
                reports = (f"{name}.json" for name in _PROMISES)
                for name in (_LAST_RUN.name, *reports, "gpu.log"):
                    if (run.scratch / name).exists():
                        shutil.copy(run.scratch / name, options.out)
    return 0 if _is_good(record) else 1


if __name__ == "__main__":
    sys.exit(main())
