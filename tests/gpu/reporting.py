"""How does a run on a GPU learn what each test did, even if pytest is killed?

A pytest plugin (``-p tests.gpu.reporting``) that writes one line of JSON for each event
to the file named by ``GPUPREFETCH_TEST_REPORT``, at once. A report that is written at
the end would be missing just when it is wanted: after a hang or a crash.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

_LAST_LINES = 25


def _write(**event: Any) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        return  # The process that hands out the tests hears of them too.
    with Path(os.environ["GPUPREFETCH_TEST_REPORT"]).open("a") as report:
        report.write(json.dumps(event) + "\n")


def pytest_runtest_logstart(nodeid: str) -> None:
    _write(event="start", name=nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    outcome: str = report.outcome
    if outcome == "skipped" and hasattr(report, "wasxfail"):
        outcome = "failed"  # Nothing in this suite is expected to fail.
    _write(
        event=report.when,
        name=report.nodeid,
        outcome=outcome,
        seconds=round(report.duration, 3),
        text=_text(report) if outcome != "passed" else "",
    )


def pytest_runtest_logfinish(nodeid: str) -> None:
    _write(event="finish", name=nodeid)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _write(
            event="collect", name=report.nodeid, outcome="failed", text=_text(report)
        )


def _text(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Reason of a skip, or the last lines of a failure."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    return "\n".join(str(report.longrepr).splitlines()[-_LAST_LINES:])
