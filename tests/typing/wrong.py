"""Code that a type checker must refuse: one error in each marked line."""

from torch import Tensor

from gpuprefetch import StreamPrefetchLoader


def wrong(source: list[tuple[Tensor, Tensor]]) -> None:
    loader = StreamPrefetchLoader(source)
    for batch in loader:
        batch.keys()  # error
    StreamPrefetchLoader(source, depth="2")  # error
    StreamPrefetchLoader(source, num_workers=2)  # error
    StreamPrefetchLoader(source, transform="blur")  # error
    StreamPrefetchLoader(7)  # error
