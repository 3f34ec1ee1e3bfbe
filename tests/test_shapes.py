"""Which shapes look like channels last?"""

import pytest

from gpuprefetch.shapes import looks_channels_last


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
