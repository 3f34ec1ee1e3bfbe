"""Can what other libraries make be a source: timm, torchdata, webdataset?"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import kornia.augmentation as K
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler
from torchvision.transforms.v2 import functional as vision

from gpuprefetch import StreamPrefetchLoader

pytestmark = pytest.mark.filterwarnings("default")


def image_of(index: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(index)
    return torch.randint(0, 256, (3, 32, 32), dtype=torch.uint8, generator=generator)


class Pairs(torch.utils.data.Dataset[Any]):
    """Item i is an image drawn from i, and i."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return image_of(index), index


class PilPairs(Pairs):
    """The same as timm wants it: PIL images, put through what timm sets here."""

    transform: Any = None

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.transform(vision.to_pil_image(image_of(index))), index


# timm #


def build_timm_loader(**settings: Any) -> Any:
    timm_data = pytest.importorskip("timm.data")
    return timm_data.create_loader(
        PilPairs(),
        input_size=(3, 32, 32),
        batch_size=4,
        no_aug=True,
        num_workers=0,
        pin_memory=False,
        **settings,
    )


def test_timm_data_come_out_as_from_its_own_prefetcher(device: torch.device) -> None:
    """Same order, same pixels, with normalizing as our transform."""
    theirs = build_timm_loader(device=device)
    mean, std = theirs.mean.flatten().cpu() / 255, theirs.std.flatten().cpu() / 255
    ours = StreamPrefetchLoader(theirs.loader, K.Normalize(mean, std), device=device)
    assert len(ours) == 3
    for (one, labels), (other, other_labels) in zip(ours, theirs, strict=True):
        assert torch.equal(labels, other_labels)
        assert (one.device, one.dtype) == (other.device, other.dtype)
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_timm_without_prefetcher_is_an_ordinary_source() -> None:
    source = build_timm_loader(use_prefetcher=False)
    for (one, _), (other, _) in zip(StreamPrefetchLoader(source), source, strict=True):
        assert torch.equal(one, other)


# torchdata #


def build_stateful() -> Any:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    return stateful.StatefulDataLoader(Pairs(), 2, shuffle=True, num_workers=1)


def build_node() -> Any:
    nodes = pytest.importorskip("torchdata.nodes")

    def load(index: int) -> tuple[torch.Tensor, int]:
        return image_of(index), index

    order = RandomSampler(range(12), generator=torch.Generator().manual_seed(4))
    node = nodes.ParallelMapper(
        nodes.SamplerWrapper(order), load, num_workers=2, method="thread"
    )
    batched = nodes.Batcher(node, 2)
    return nodes.Loader(nodes.Mapper(batched, torch.utils.data.default_collate))


@pytest.mark.parametrize("build", [build_stateful, build_node])
@pytest.mark.parametrize("saved_after", [1, 4])
def test_torchdata_resumes_by_its_own_state(
    build: Callable[[], Any], saved_after: int
) -> None:
    """Nothing is read again that the loop had got, and the pixels are the same."""
    augment = K.RandomRotation(90.0, p=1.0)
    loader = StreamPrefetchLoader(build(), augment, device="cpu", seed=0, depth=3)
    rest, state = [], None
    for number, (images, labels) in enumerate(loader, start=1):
        if number > saved_after:
            rest.append((images, labels))
        if number == saved_after:
            state = loader.state_dict()
    assert len(rest) == 6 - saved_after
    again = StreamPrefetchLoader(build(), augment, device="cpu", seed=0)
    assert state is not None
    again.load_state_dict(state)
    for (one, label), (other, other_label) in zip(again, rest, strict=True):
        assert torch.equal(label, other_label)
        assert torch.equal(one, other)


# webdataset #


@pytest.mark.parametrize("num_workers", [0, 2])
def test_webdataset_shards_are_a_source(num_workers: int, tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    shards = [str(tmp_path / f"{number}.tar") for number in range(2)]
    for number, path in enumerate(shards):
        with webdataset.TarWriter(path) as shard:
            for index in range(6 * number, 6 * number + 6):
                pixels = image_of(index).numpy().tobytes()
                entry = {"pixels": pixels, "cls": str(index).encode()}
                shard.write({"__key__": str(index), **entry})

    def decode(sample: dict[str, bytes]) -> tuple[torch.Tensor, int]:
        flat = torch.frombuffer(bytearray(sample["pixels"]), dtype=torch.uint8)
        return flat.reshape(3, 32, 32), int(sample["cls"])

    pipeline = webdataset.WebDataset(shards, shardshuffle=False).map(decode)
    loader = StreamPrefetchLoader(DataLoader(pipeline, 3, num_workers=num_workers))
    for _ in range(2):
        seen = {}
        for images, labels in loader:
            seen |= dict(zip(labels.tolist(), images, strict=True))
        assert sorted(seen) == list(range(12))
        assert all(torch.equal(seen[i].cpu(), image_of(i)) for i in seen)
