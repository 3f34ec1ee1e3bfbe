"""What does ``python -m gpuprefetch`` run? What :mod:`gpuprefetch.cli` holds."""

import sys


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
