"""What did a test leave running: feeder threads, child processes?"""

import os
import threading
import time
from pathlib import Path

__all__ = ["FEEDER_NAME", "child_pids", "feeder_threads", "leaked", "wait_until_gone"]

FEEDER_NAME = "gpuprefetch-feeder"

# Helpers that live as long as the interpreter does: of Python's multiprocessing, and of
# Open MPI, which Lightning asks whether it runs under it.
_HELPERS = ("resource_tracker", "forkserver", "semaphore_tracker")
_HELPER_PROGRAMS = ("orted",)


def feeder_threads() -> list[threading.Thread]:
    """List the loader's threads that are alive in this process."""
    return [t for t in threading.enumerate() if t.name.startswith(FEEDER_NAME)]


def child_pids(pid: int | None = None) -> set[int]:
    """List the direct children of a process (this one), helpers and zombies aside."""
    parent = os.getpid() if pid is None else pid
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name may hold blanks and brackets; what follows it does not.
            state, ppid = stat.read_text().rpartition(")")[2].split()[:2]
            command = (stat.parent / "cmdline").read_text()
        except (OSError, ValueError):
            continue
        program = Path(command.partition("\0")[0]).name
        is_helper = program.partition(" ")[0] in _HELPER_PROGRAMS or any(
            name in command for name in _HELPERS
        )
        if int(ppid) == parent and state != "Z" and not is_helper:
            found.add(int(stat.parent.name))
    return found


def leaked() -> set[str]:
    """Describe what is running now, one text for each thread and child process."""
    threads = {f"thread {t.name} ({t.ident})" for t in feeder_threads()}
    return threads | {f"process {pid}: {_command_of(pid)}" for pid in child_pids()}


def _command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    except OSError:  # It has just ended.
        return ""


def wait_until_gone(limit_s: float, known: set[str] | None = None) -> set[str]:
    """Wait until nothing but ``known`` runs, at most ``limit_s``; tell what is left."""
    deadline = time.monotonic() + limit_s
    while (left := leaked() - (known or set())) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left
