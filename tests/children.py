"""How does a test run a script in a process of its own, with a limit on its time?"""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

__all__ = ["Child", "run_script", "start_script"]

_ROOT = Path(__file__).resolve().parent.parent

# Tests send Ctrl-C. What a shell starts in the background ignores it, and so would the
# children: Python installs its handler only where the signal was not ignored.
_LISTEN_TO_CTRL_C = """\
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
"""


class Child:
    """A script that runs in its own session, so that all of it can be seen and ended.

    Use it in a ``with`` block: whatever is left of it is killed at the end.
    """

    def __init__(
        self, script: str, *arguments: str, options: Sequence[str] = ()
    ) -> None:
        environment = {**os.environ, "PYTHONPATH": _python_path()}
        dedented = textwrap.dedent(script)
        self.process = subprocess.Popen(
            [
                *(sys.executable, *options),
                *("-c", _LISTEN_TO_CTRL_C + dedented, *arguments),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
            env=environment,
            start_new_session=True,
        )

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *error: object) -> None:
        self.signal_all(signal.SIGKILL)
        self.process.communicate()

    def read_line(self) -> str:
        """Wait for the script's next line of output."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def signal_all(self, number: signal.Signals) -> bool:
        """Send a signal as a terminal does: to the script and to all its children.

        Returns:
            Whether anything was left to get it.
        """
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            return False
        return True

    def finish(self, limit_s: float) -> tuple[int, str, str]:
        """Wait for the end.

        Returns:
            Exit status, standard output, standard error.

        Raises:
            AssertionError: It still runs after ``limit_s``.
        """
        try:
            out, err = self.process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            self.signal_all(signal.SIGKILL)
            out, err = self.process.communicate()
            raise AssertionError(
                f"still running after {limit_s} s\n--- out\n{out}\n--- err\n{err}"
            ) from None
        return self.process.returncode, out, err


def start_script(script: str, *arguments: str, options: Sequence[str] = ()) -> Child:
    """Start a script in the project's root; ``tests`` can be imported from it."""
    return Child(script, *arguments, options=options)


def run_script(
    script: str,
    *arguments: str,
    limit_s: float = 60.0,
    options: Sequence[str] = (),
) -> str:
    """Run a script to its end and return what it printed.

    Args:
        script: Python code; indented as a whole, if need be.
        *arguments: What it finds in ``sys.argv``.
        limit_s: Time that it may take.
        options: Of the interpreter, such as ``-O``.

    Raises:
        AssertionError: It failed, wrote to its standard error, or took too long.
    """
    with start_script(script, *arguments, options=options) as child:
        status, out, err = child.finish(limit_s)
    assert status == 0, f"exit status {status}\n--- out\n{out}\n--- err\n{err}"
    assert not err.strip(), f"wrote to standard error:\n{err}"
    return out


def _python_path() -> str:
    given = os.environ.get("PYTHONPATH")
    return os.pathsep.join([str(_ROOT), *([given] if given else [])])
