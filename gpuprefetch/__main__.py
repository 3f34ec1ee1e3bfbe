"""What do ``python -m gpuprefetch`` and ``gpuprefetch`` run? :mod:`gpuprefetch.cli`."""

import os
import sys
from contextlib import suppress


def run_script() -> int:
    """Run as the script ``gpuprefetch``; returns the exit code."""
    # As `python -m` does: the user's own modules lie there.
    if not sys.flags.safe_path:
        with suppress(OSError):  # The folder may be gone.
            sys.path.insert(0, os.getcwd())
    return _run()


def _run() -> int:
    try:
        # In here, since it takes seconds in which somebody may press Ctrl-C.
        from gpuprefetch.cli.app import main
    except KeyboardInterrupt:
        sys.stderr.write("python -m gpuprefetch: interrupted\n")
        return 130
    return main()


if __name__ == "__main__":
    sys.exit(_run())
