"""How does the command line find its commands and report what went wrong?

Every mistake of the user ends in one line on standard error and exit code 2; Ctrl-C
ends in exit code 130. A traceback means a fault of ours.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

import gpuprefetch
from gpuprefetch.cli.bench import add_to as add_bench
from gpuprefetch.cli.demo import add_to as add_demo
from gpuprefetch.cli.plot import add_to as add_plot
from gpuprefetch.cli.probe import add_to as add_probe
from gpuprefetch.cli.show import add_to as add_show
from gpuprefetch.errors import GpuPrefetchError

__all__ = ["main"]

_PROGRAM = "python -m gpuprefetch"  # Works where the script is not installed, too.
_EXIT_USAGE = 2
_EXIT_INTERRUPTED = 130


class _Parser(argparse.ArgumentParser):
    """A parser whose complaint is one line, without the usage text before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(_EXIT_USAGE, f"{self.prog}: error: {message} (see --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: Without the program's name; those of the process if not given.

    Returns:
        The exit code.
    """
    parsed = _build_parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = parsed.command
    try:
        return command(parsed)
    except KeyboardInterrupt:
        print(f"{_PROGRAM}: interrupted", file=sys.stderr)
        return _EXIT_INTERRUPTED
    except (GpuPrefetchError, OSError) as error:
        one_line = " ".join(_describe(error).split())
        print(f"{_PROGRAM} {parsed.name}: error: {one_line}", file=sys.stderr)
        return _EXIT_USAGE


def _describe(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"cannot use {error.filename}: {error.strerror}"
    return str(error)


def _build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=_PROGRAM,
        description="Copies and augments the next batch while the model trains on "
        "this one.",
    )
    version = f"gpuprefetch {gpuprefetch.__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(
        dest="name", metavar="COMMAND", required=True, parser_class=_Parser
    )
    add_demo(commands)
    add_probe(commands)
    add_plot(commands)
    add_show(commands)
    add_bench(commands)
    return parser
