"""Can a chart be read where a page shows it, about 900 pixels wide?"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from matplotlib.text import Text

from gpuprefetch import plot
from gpuprefetch.plot import COLOURS, save_bars, save_lines

PAGE_INCHES = 900 / 96
"""How wide a page is, as a browser counts inches."""

NAMES = ("bound: step alone, batch on the device", "plain", "ours, graphed")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Figures that were drawn, instead of files."""
    figures: list[Any] = []
    monkeypatch.setattr(plot, "save_figure", lambda f, *_, **__: figures.append(f))
    return figures


def draw_bars(num_clusters: int) -> None:
    places = range(num_clusters)
    save_bars(
        {
            NAMES[0]: [100.0 * place + 3 for place in places],
            NAMES[1]: [None, *(100.0 * place + 1 for place in places[1:])],
            NAMES[2]: [100.0 * place + 2 for place in places],
        },
        [f"B={place}" for place in places],
        Path("x.png"),
        unit="steps/s",
        heading="How fast?",
        highlighted=[NAMES[2]],
    )


def sizes_on_page(figure: Any) -> Iterator[float]:
    """The height of each text that is seen, in points, once a page shows the figure."""
    figure.canvas.draw()
    scale = min(1.0, PAGE_INCHES / figure.get_figwidth())
    for text in figure.findobj(Text):
        if text.get_text() and text.get_visible():
            yield text.get_fontsize() * scale


@pytest.mark.parametrize(
    ("num_clusters", "rows"),
    [
        (1, [1]),
        (2, [2]),
        (3, [3]),
        (4, [2, 2]),
        (5, [3, 2]),
        (6, [3, 3]),
        (7, [3, 3, 1]),
    ],
)
def test_no_more_than_three_panels_stand_in_a_row(
    num_clusters: int, rows: list[int], drawn: list[Any]
) -> None:
    draw_bars(num_clusters)
    (figure,) = drawn
    figure.canvas.draw()
    feet = [round(panel.get_position().y0, 2) for panel in figure.axes]
    assert [feet.count(foot) for foot in sorted(set(feet), reverse=True)] == rows
    # In the order given: along a row, then down.
    assert [panel.get_title() for panel in figure.axes] == [
        f"B={place}" for place in range(num_clusters)
    ]


def test_all_panels_have_the_same_bars_in_the_same_order(drawn: list[Any]) -> None:
    draw_bars(5)
    panels = drawn[0].axes
    for place, panel in enumerate(panels[1:], start=1):
        from_the_top = sorted(
            panel.patches,
            key=lambda bar: -panel.transData.transform((0, bar.get_y()))[1],
        )
        lengths = [bar.get_width() - 100 * place for bar in from_the_top]
        assert lengths == [3, 1, 2]
    # Names are written once a row.
    written = [[one.get_text() for one in panel.get_yticklabels()] for panel in panels]
    assert written == [list(NAMES), [], [], list(NAMES), []]


@pytest.mark.parametrize("num_clusters", [2, 5, 6])
def test_bars_are_read_at_the_width_of_a_page(
    num_clusters: int, drawn: list[Any]
) -> None:
    draw_bars(num_clusters)
    assert min(sizes_on_page(drawn[0])) >= 9


def test_lines_are_read_at_the_width_of_a_page(drawn: list[Any]) -> None:
    names = [*NAMES, "ours, copy only, pageable source"]
    lines = {name: [(1.0, 10.0), (8.0, 90.0)] for name in names}
    save_lines(dict.fromkeys("abc", lines), Path("x.png"), unit="us", heading="h")
    (figure,) = drawn
    assert min(sizes_on_page(figure)) >= 9
    legend = figure.legends[0].get_window_extent()
    assert 0 <= legend.x0 < legend.x1 <= figure.bbox.width


def test_highlighted_bars_have_a_colour_and_bold_names(drawn: list[Any]) -> None:
    draw_bars(5)
    for panel in drawn[0].axes:
        colours = [bar.get_facecolor() for bar in panel.patches]
        assert colours[0] == colours[1] != colours[2]
    weights = [label.get_fontweight() for label in drawn[0].axes[0].get_yticklabels()]
    assert weights == ["normal", "normal", "bold"]


def test_a_bar_that_was_not_measured_says_so(drawn: list[Any]) -> None:
    draw_bars(2)
    first, second = drawn[0].axes
    assert [text.get_text().strip() for text in first.texts] == [
        "3",
        "not measured",
        "2",
    ]
    assert [text.get_text().strip() for text in second.texts] == ["103", "101", "102"]


def test_lines_and_bars_share_the_palette(drawn: list[Any]) -> None:
    save_lines({"x": {"ours": [(1.0, 2.0)]}}, Path("x.png"), unit="us")
    assert drawn[0].axes[0].lines[0].get_color() == COLOURS[0]
