"""Do the shared workloads give the photographs, chains and model that they promise?"""

import pickle
import socket
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from gpuprefetch.errors import DependencyError, SettingError
from gpuprefetch.plot import save_grid
from gpuprefetch.workloads import (
    PHOTOGRAPHS,
    PhotographDataset,
    TrainingStep,
    batch_chain,
    build_model,
    kornia_chain,
    load_photograph,
    to_unit_float,
    worker_chain,
)
from tests.children import run_script

SIZE = 32

# Photographs #


@pytest.mark.parametrize("name", PHOTOGRAPHS)
def test_a_photograph_needs_no_network(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("opened a socket")

    monkeypatch.setattr(socket, "socket", refuse)
    photograph = load_photograph(name)
    assert photograph.dtype == torch.uint8
    assert photograph.shape[0] == 3
    assert min(photograph.shape[1:]) >= 256
    assert photograph.is_contiguous()
    assert len(photograph.unique()) > 50


def test_an_unknown_photograph_is_refused_with_the_list() -> None:
    with pytest.raises(SettingError, match=r"no photograph 'moon'.*astronaut, chelsea"):
        load_photograph("moon")


def test_missing_scikit_image_is_named_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "skimage", None)
    monkeypatch.setitem(sys.modules, "skimage.data", None)
    with pytest.raises(DependencyError, match=r"pip install 'gpuprefetch-torch\[demo"):
        load_photograph("coffee")


# Data set #


@pytest.fixture(scope="module")
def dataset() -> PhotographDataset:
    return PhotographDataset(SIZE, length=200)


def test_an_item_is_the_same_in_every_data_set(dataset: PhotographDataset) -> None:
    other = pickle.loads(pickle.dumps(PhotographDataset(SIZE, length=5)))
    for index in range(5):
        image, label = dataset[index]
        again, label_again = other[index]
        torch.testing.assert_close(again, image, rtol=0, atol=0)
        assert label_again == label


def test_items_differ_and_show_every_photograph(dataset: PhotographDataset) -> None:
    items = list(dataset)
    assert len(items) == len(dataset) == 200
    assert {label for _, label in items} == set(range(dataset.num_classes))
    assert len({image.numpy().tobytes() for image, _ in items}) > 100
    assert {(image.dtype, tuple(image.shape)) for image, _ in items} == {
        (torch.uint8, (3, SIZE, SIZE))
    }


def test_an_item_holds_its_own_pixels_only(dataset: PhotographDataset) -> None:
    image, _ = dataset[0]
    assert image.untyped_storage().nbytes() == 3 * SIZE * SIZE


@pytest.mark.parametrize("index", [-1, 200])
def test_an_index_outside_is_refused(dataset: PhotographDataset, index: int) -> None:
    with pytest.raises(IndexError, match=r"outside \[0, 200\)"):
        dataset[index]


def test_the_transform_gets_each_image() -> None:
    dataset = PhotographDataset(SIZE, transform=worker_chain(SIZE), length=1)
    image, _ = dataset[0]
    assert image.dtype == torch.float32


# Chains #


@pytest.fixture
def copies(dataset: PhotographDataset) -> torch.Tensor:
    """Eight copies of one photograph: (8, 3, SIZE, SIZE), uint8."""
    return dataset[0][0].expand(8, -1, -1, -1).contiguous()


def _in_workers(images: torch.Tensor) -> torch.Tensor:
    chain = worker_chain(SIZE)
    return torch.stack([chain(image) for image in images])


def _by_hand(images: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = batch_chain(SIZE)(images)
    return result


def _with_kornia(images: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = kornia_chain(SIZE)(to_unit_float(images))
    return result


@pytest.mark.parametrize("augment", [_in_workers, _by_hand, _with_kornia])
def test_every_chain_draws_anew_for_each_image(augment, copies) -> None:
    augmented = augment(copies)
    assert augmented.dtype == torch.float32
    assert augmented.shape == copies.shape
    assert augmented.min() >= 0
    assert augmented.max() <= 1 + 1e-6
    assert len(torch.unique(augmented, dim=0)) == 8


@pytest.mark.parametrize(
    "build", [worker_chain, batch_chain, kornia_chain, build_model, PhotographDataset]
)
def test_an_image_too_small_for_the_chain_is_refused(build) -> None:
    with pytest.raises(SettingError, match="at least 16 pixels, got 15"):
        build(15)


# Model and step #


def test_the_model_has_nine_convolutions_at_256_pixels() -> None:
    with torch.device("meta"):
        model = build_model(256)
    convolutions = [layer for layer in model if isinstance(layer, torch.nn.Conv2d)]
    assert [layer.out_channels for layer in convolutions] == [
        16 * 2**place for place in range(9)
    ]


@pytest.mark.parametrize("image_size", [16, 64, 100, 224, 256, 300, 512])
def test_the_model_takes_images_of_its_size(image_size: int) -> None:
    with torch.device("meta"):
        model = build_model(image_size, num_classes=7)
        assert model(torch.empty(2, 3, image_size, image_size)).shape == (2, 7)


def test_training_steps_lower_the_loss_and_keep_no_graph() -> None:
    torch.set_num_threads(1)
    images, labels = torch.rand(8, 3, SIZE, SIZE), torch.arange(8)
    step = TrainingStep(build_model(SIZE, 8))
    losses = [step(images, labels) for _ in range(20)]
    assert losses[-1] < losses[0]
    assert not any(loss.requires_grad for loss in losses)


# Imports and pictures #


def test_importing_the_workloads_loads_no_optional_package() -> None:
    printed = run_script(
        """
        import sys
        import gpuprefetch.workloads, gpuprefetch.plot
        optional = {"skimage", "matplotlib", "kornia"}
        print(sorted(optional & set(sys.modules)))
        """
    )
    assert printed.strip() == "[]"


def test_a_grid_shows_every_image_in_its_cell(tmp_path: Path) -> None:
    images = [
        torch.full((3, 8, 8), 200, dtype=torch.uint8),
        torch.full((3, 8, 8), 0.6),
        torch.full((1, 8, 8), 2.0),  # Clipped to white.
        torch.zeros(3, 8, 8),
    ]
    path = tmp_path / "grid.png"
    save_grid(images, ["a", "b", "c", "d"], path, columns=2, heading="four")
    picture = Image.open(path).convert("L")
    width, height = picture.size
    shades = [
        picture.getpixel((int(x * width), int(y * height)))
        for y in (0.35, 0.8)
        for x in (0.25, 0.75)
    ]
    assert shades == [200, 153, 255, 0]


def test_missing_matplotlib_is_named_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(DependencyError, match=r"pip install 'gpuprefetch-torch\[plot"):
        save_grid([torch.zeros(3, 4, 4)], ["a"], tmp_path / "grid.png")
