"""How does a test run a script in several processes that train together?"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

__all__ = ["torchrun"]

_ROOT = Path(__file__).resolve().parent.parent


def torchrun(script: str, *arguments: str, num_ranks: int, limit_s: float = 60) -> str:
    """Run a script of this project through torchrun, on this machine alone.

    Args:
        script: Path from the project's root.
        arguments: For the script.
        num_ranks: How many processes; each gets ``RANK`` and the like.
        limit_s: After that, all of them are ended.

    Returns:
        What they printed.

    Raises:
        AssertionError: One of them failed, or the time was up.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={num_ranks}", script, *arguments]
    # To a file: a full pipe would stop a rank that has much to say.
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command,
            cwd=_ROOT,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            # A rank that waits for a dead one would go on waiting.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        said = output.read()
    problem = "too slow" if status is None else f"exit status {status}"
    assert status == 0, f"{problem}, limit {limit_s} s\n{said[-10_000:]}"
    return said


def _environment() -> dict[str, str]:
    given = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(_ROOT), *([given] if given else [])])
    # NVLink multicast stays off: it can put the GPUs of a shared host out of service.
    return (
        {"OMP_NUM_THREADS": "1", "NCCL_NVLS_ENABLE": "0"}
        | os.environ
        | {"PYTHONPATH": path}
    )
