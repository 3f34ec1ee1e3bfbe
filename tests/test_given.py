"""Does an error from a transform say which batch it is about, and what it was given?"""

from collections.abc import Callable
from typing import Any

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from torch import nn
from torchvision.transforms import v2

from gpuprefetch import BatchError, StreamPrefetchLoader, TransformError, given
from tests.sources import count

pytestmark = pytest.mark.timeout(30)


def fail(*parts: Any) -> Any:
    raise RuntimeError("mine")


def notes_of(batch: Any, transform: Callable[..., Any] = fail, **settings: Any) -> str:
    """Run into the transform's error, and give the notes on it."""
    loader = StreamPrefetchLoader([batch], **({"transform": transform} | settings))
    with pytest.raises(Exception) as caught:  # noqa: PT011 - whatever the user raises
        next(iter(loader))
    return "\n".join(getattr(caught.value, "__notes__", []))


@pytest.mark.parametrize("background", [False, True])
def test_the_users_error_says_its_batch_and_what_came(
    device: torch.device, background: bool
) -> None:
    mine = RuntimeError("mine")

    def transform(x: torch.Tensor) -> torch.Tensor:
        if len(x) == 3:
            raise mine
        return x

    source = [torch.ones(n, 2, dtype=torch.int16) for n in (1, 2, 3)]
    batches = iter(
        StreamPrefetchLoader(source, transform, device=device, background=background)
    )
    next(batches), next(batches)
    with pytest.raises(RuntimeError, match=r"^mine") as caught:
        next(batches)
    assert caught.value is mine
    (note,) = mine.__notes__
    assert "in batch 2 of the pass" in note
    assert f"was given Tensor (3, 2) torch.int16 on {device.type}" in note


def test_a_resumed_pass_counts_from_its_start() -> None:
    first = StreamPrefetchLoader(count(5), abs, device="cpu")
    batches = iter(first)
    next(batches), next(batches)
    resumed = StreamPrefetchLoader(count(5), fail, device="cpu")
    resumed.load_state_dict(first.state_dict())
    with pytest.raises(RuntimeError) as caught:
        next(iter(resumed))
    assert "in batch 2 of the pass" in caught.value.__notes__[0]


def test_several_arguments_are_told_apart() -> None:
    batch = {"x": torch.ones(2), "box": [torch.ones(1, 4), "name"]}
    note = notes_of(batch, inputs=("x", "box"), device="cpu")
    assert "argument 0: Tensor (2,) torch.float32 on cpu, " in note
    assert (
        "argument 1[0]: Tensor (1, 4) torch.float32 on cpu, argument 1[1]: str" in note
    )


def test_a_whole_batch_is_told_by_its_places() -> None:
    batch = {"x": torch.ones(2), "y": 1}
    note = notes_of(batch, None, batch_transform=fail, device="cpu")
    assert "argument['x']: Tensor (2,) torch.float32 on cpu, argument['y']: int" in note


def test_a_long_batch_is_not_told_in_full() -> None:
    batch = {str(n): n for n in range(30)}
    note = notes_of(batch, None, batch_transform=fail, device="cpu")
    assert note.endswith("argument['9']: int, and 20 more.")


def test_a_list_of_images_is_told_as_one() -> None:
    images = [torch.zeros(3, 8, n + 1, dtype=torch.uint8) for n in range(64)]
    note = notes_of([images, torch.ones(64)], device="cpu")
    assert note.endswith(
        "argument[0]: Tensor (3, 8, 1) torch.uint8 on cpu, and 63 more like it, of "
        "other shapes."
    )
    note = notes_of([[images[0]] * 64, 5], None, batch_transform=fail, device="cpu")
    assert note.endswith(
        "argument[0][0]: Tensor (3, 8, 1) torch.uint8 on cpu, and 63 more like it, "
        "argument[1]: int."
    )


@pytest.mark.parametrize("num", [1, 2, 3])
def test_a_few_items_of_a_list_are_told_one_by_one(num: int) -> None:
    batch = [torch.ones(n + 1) for n in range(num)]
    note = notes_of(batch, None, batch_transform=fail, device="cpu")
    assert "like it" not in note
    assert note.count("torch.float32") == num


def test_a_list_of_mixed_kinds_is_told_by_its_runs() -> None:
    batch = [*[torch.ones(2)] * 5, "name", *[torch.ones(2).int()] * 5]
    note = notes_of(batch, None, batch_transform=fail, device="cpu")
    assert note.count("and 4 more like it") == 2
    assert "argument[5]: str" in note


# The number of values #


def takes_two(x: Any, y: Any, strength: float = 1.0) -> Any:
    return x, y


class TakesTwo(nn.Module):
    def forward(self, x: Any, y: Any) -> Any:
        return x, y


@pytest.mark.parametrize(
    ("transform", "inputs", "said"),
    [
        (
            takes_two,
            None,
            "takes 2 values and was given 1: inputs=(0, 1)",
        ),
        (
            TakesTwo(),
            None,
            "takes 2 values and was given 1: inputs=(0, 1)",
        ),
        (
            lambda a, b, c: a,
            (0, 1),
            "takes 3 values and was given 2: inputs=(0, 1, 2)",
        ),
        (
            lambda x: x,
            (0, 1),
            "takes 1 value and was given 2: inputs=0",
        ),
    ],
)
def test_another_number_of_values_is_told_with_the_cure(
    transform: Callable[..., Any], inputs: Any, said: str
) -> None:
    note = notes_of([torch.ones(2)] * 3, transform, inputs=inputs, device="cpu")
    number, _, cure = said.partition(": ")
    assert f"{number}. As transform=, it gets {said.split()[1]} with {cure}" in note
    assert "as many keys or fields" in note


def test_a_function_of_the_batch_is_told_where_two_values_come_from() -> None:
    batch = [torch.ones(2)] * 2
    note = notes_of(batch, None, batch_transform=takes_two, device="cpu")
    assert "As transform=, it gets 2 with inputs=(0, 1)" in note


def raises_inside(x: Any) -> Any:
    return takes_two(x)


@pytest.mark.parametrize("transform", [raises_inside, fail, torch.stack])
def test_other_errors_say_nothing_of_the_number(transform: Callable[..., Any]) -> None:
    note = notes_of([torch.ones(2), 3], transform, device="cpu")
    assert "was given" in note
    assert "it gets" not in note


def test_places_are_looked_for_of_so_many_leaves_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked_for: list[Any] = []

    def path_to(batch: Any, part: Any) -> str:
        looked_for.append(part)
        return "batch"

    monkeypatch.setattr(given, "path_to", path_to)
    captions = [str(number) for number in range(1000)]
    notes_of(captions, None, batch_transform=fail, device="cpu")
    assert looked_for == captions[:256]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_cannot_be_described_does_not_hide_the_error() -> None:
    ragged = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
    with pytest.raises(RuntimeError, match="size"):
        ragged.shape  # noqa: B018
    with pytest.raises(RuntimeError, match=r"^mine") as caught:
        next(iter(StreamPrefetchLoader([ragged], fail, device="cpu")))
    assert not hasattr(caught.value, "__notes__")


def test_an_error_that_takes_no_notes_is_raised_as_it_is() -> None:
    class WithoutNotes(RuntimeError):
        __notes__ = "none"

    def transform(x: torch.Tensor) -> torch.Tensor:
        raise WithoutNotes("mine")

    with pytest.raises(WithoutNotes, match=r"^mine"):
        next(iter(StreamPrefetchLoader([torch.ones(2)], transform, device="cpu")))


def test_nothing_is_noted_where_the_transform_did_not_run() -> None:
    assert notes_of({"x": 1}, device="cpu") == ""


# NumPy arrays #

ARRAY = np.zeros((2, 3, 8, 8), dtype=np.uint8)


def test_an_array_that_reaches_the_transform_is_told_from_numpy() -> None:
    note = notes_of([ARRAY], torch.neg, device="cpu")
    assert "given ndarray (2, 3, 8, 8) uint8 in host memory" in note
    assert "in the collate function, with torch.from_numpy" in note


@pytest.mark.parametrize(
    "module",
    [
        K.RandomHorizontalFlip(),
        nn.Sequential(K.RandomCrop((4, 4)), K.RandomPerspective()),
    ],
    ids=["fused", "chain"],
)
def test_kornia_asks_for_a_tensor_instead_of_an_array(module: nn.Module) -> None:
    loader = StreamPrefetchLoader([[ARRAY]], module, device="cpu")
    with pytest.raises(
        BatchError, match=r"is an ndarray.*torch\.from_numpy, in the collate function"
    ) as caught:
        next(iter(loader))
    assert "from_numpy" not in caught.value.__notes__[0]


def test_an_array_that_comes_back_is_told_where_it_may_come_from() -> None:
    loader = StreamPrefetchLoader([[ARRAY]], lambda x: x + 1, device="cpu")
    with pytest.raises(TransformError, match=r"NumPy array.*got one.*from_numpy"):
        next(iter(loader))


# Channels last #


@pytest.mark.parametrize(
    "module",
    [
        K.RandomCrop((16, 16)),
        nn.Sequential(K.RandomHorizontalFlip(), K.CenterCrop(16)),
        K.Normalize(torch.tensor([0.4, 0.5, 0.6]), torch.tensor([0.2, 0.3, 0.4])),
        nn.Sequential(K.RandomPerspective(p=1.0), K.RandomCrop((16, 16))),
        K.ColorJiggle(0.1, 0.1, 0.1, 0.1, p=1.0),
    ],
    ids=["crop", "chain", "normalize", "kept", "jiggle"],
)
def test_an_error_at_channels_last_images_says_what_they_look_like(
    device: torch.device, module: nn.Module
) -> None:
    images = torch.zeros(2, 32, 32, 3, dtype=torch.uint8)
    note = notes_of(images, module, device=device)
    assert "looks like (B, H, W, C)" in note
    assert "images.permute(0, 3, 1, 2)" in note


def test_an_error_at_channels_first_images_gives_no_such_hint() -> None:
    note = notes_of(torch.zeros(2, 5, 8, 8), device="cpu")
    assert "(2, 5, 8, 8)" in note
    assert "looks like" not in note


# Whole numbers #


@pytest.mark.parametrize(
    "transform",
    [nn.Conv2d(3, 4, 3).requires_grad_(False), v2.Normalize([0.5] * 3, [0.5] * 3)],
    ids=["model", "torchvision"],
)
def test_an_error_at_uint8_images_says_that_they_come_unscaled(
    device: torch.device, transform: nn.Module
) -> None:
    images = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
    note = notes_of(images, transform.to(device), device=device)
    assert "with images.float() / 255" in note


def test_errors_about_anything_else_do_not_speak_of_scaling() -> None:
    uint8 = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
    assert "scale" not in notes_of(uint8, device="cpu")
    assert "scale" not in notes_of(uint8.float(), lambda x: x & 1, device="cpu")
    # A Kornia module that is the transform gets them scaled.
    both = K.AugmentationSequential(K.RandomCrop((4, 4)), data_keys=["image", "mask"])
    note = notes_of((uint8.long(), uint8), both, inputs=(0, 1), device="cpu")
    assert "was given" in note
    assert "scale" not in note
