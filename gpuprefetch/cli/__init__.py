"""The command line: ``python -m gpuprefetch COMMAND``. One file per command."""
