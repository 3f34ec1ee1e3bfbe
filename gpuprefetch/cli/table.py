"""How are rows of text lined up on a terminal?"""

from collections.abc import Sequence

__all__ = ["format_table"]

_GAP = "  "


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Line up columns: the first to the left, the others to the right.

    Args:
        header: One title a column.
        rows: Each as long as ``header``.

    Returns:
        Lines without a newline at the end; a rule lies under the header.
    """
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rule = ["-" * width for width in widths]
    return "\n".join(_format_line(line, widths) for line in (header, rule, *rows))


def _format_line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = (
        cell.rjust(width) if place else cell.ljust(width)
        for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return _GAP.join((first, *others)).rstrip()
