"""Which shapes look like channels last, and which like gray images?"""

import pytest

from gpuprefetch.shapes import looks_channels_last, looks_gray


@pytest.mark.parametrize(
    ("shape", "is_likely"),
    [
        ((2, 224, 224, 3), True),
        ((2, 32, 32, 4), True),
        ((2, 28, 28, 1), True),
        ((2, 3, 224, 224), False),
        ((2, 3, 32, 3), False),
        ((2, 4, 4, 4), False),
        ((2, 224, 224, 5), False),
        ((224, 224, 3), False),
        ((2, 8, 224, 224, 3), False),
    ],
)
def test_it_looks_channels_last_or_not(shape: tuple[int, ...], is_likely: bool) -> None:
    assert looks_channels_last(shape) is is_likely


@pytest.mark.parametrize(
    ("shape", "is_likely"),
    [
        ((32, 28, 28), True),
        ((2, 28, 28), True),
        ((3, 28, 28), False),
        ((1, 28, 28), False),
        ((4, 28, 28), False),
        ((32, 1, 28, 28), False),
        ((32, 28), False),
        ((), False),
    ],
)
def test_it_may_be_gray_images_or_not(shape: tuple[int, ...], is_likely: bool) -> None:
    assert looks_gray(shape) is is_likely
