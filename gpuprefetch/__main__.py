"""What does ``python -m gpuprefetch`` run? What :mod:`gpuprefetch.cli` holds."""

import sys

from gpuprefetch.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
