"""Code that a type checker must refuse: one error in each marked line."""

from torch import Tensor
from torch.utils.data import DataLoader

from gpuprefetch import StreamPrefetchLoader


def shape(batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return batch["x"], 1


def wrong(source: list[tuple[Tensor, Tensor]], samples: DataLoader[Tensor]) -> None:
    loader = StreamPrefetchLoader(source)
    for batch in loader:
        batch.keys()  # error
    for image in StreamPrefetchLoader[Tensor](samples):
        image.keys()  # error
    for x, y in StreamPrefetchLoader(samples, batch_transform=shape):
        x.mean()
        y.mean()  # error
    StreamPrefetchLoader[Tensor](source)  # error
    StreamPrefetchLoader(source, depth="2")  # error
    StreamPrefetchLoader(source, num_workers=2)  # error
    StreamPrefetchLoader(source, transform="blur")  # error
    StreamPrefetchLoader(source, abs, batch_transform=shape)  # error
    StreamPrefetchLoader(7)  # error
