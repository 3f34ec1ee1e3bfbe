"""On which machine, with which software, and of which code was something measured?

``python -m benchmarks.machine`` prints the record as JSON.
"""

import datetime
import hashlib
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

__all__ = ["describe_machine"]

_ROOT = Path(__file__).resolve().parent.parent


def describe_machine() -> dict[str, Any]:
    """Describe machine, software and code, in values that JSON knows."""
    has_cuda = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if has_cuda else None,
        "num_gpus": torch.cuda.device_count(),
        "driver": _output("nvidia-smi", "--query-gpu=driver_version") or None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "num_cpus": os.cpu_count(),
        "commit": _commit(),
        "package_commit": _package_commit(),
        "dirty": _is_dirty(),
        "package_sha256": _digest("gpuprefetch"),
        "benchmarks_sha256": _digest("benchmarks"),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _output(*command: str) -> str:
    """First line that a program prints; nothing when it is missing or fails."""
    if command[0] == "nvidia-smi":
        command = (*command, "--format=csv,noheader")
    try:
        finished = subprocess.run(
            command, cwd=_ROOT, capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return finished.stdout.strip().partition("\n")[0].strip()


def _commit() -> str | None:
    """Commit of the tree: from the environment where ``.git`` did not travel along."""
    given = os.environ.get("GPUPREFETCH_COMMIT")
    return given or _output("git", "rev-parse", "HEAD") or None


def _package_commit() -> str | None:
    """Last commit that touched the package itself."""
    given = os.environ.get("GPUPREFETCH_PACKAGE_COMMIT")
    return given or _output("git", "log", "-1", "--format=%H", "--", "gpuprefetch")


def _is_dirty() -> bool | None:
    """Tell whether the package differs from the commit; ``None`` if git is missing."""
    given = os.environ.get("GPUPREFETCH_DIRTY")
    if given:
        return given != "0"
    if not _output("git", "rev-parse", "HEAD"):
        return None
    return bool(_output("git", "status", "--porcelain", "--", "gpuprefetch"))


def _digest(folder: str) -> str:
    """Hash a folder's sources, so that a record can be matched without git."""
    digest = hashlib.sha256()
    top = _ROOT / folder
    sources = (path for kind in ("*.py", "*.cu") for path in top.rglob(kind))
    for path in sorted(sources):
        digest.update(path.relative_to(top).as_posix().encode() + b"\0")
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()


if __name__ == "__main__":
    print(json.dumps(describe_machine(), indent=2))
