"""Is the user's module left as it was, and are its changes heeded?"""

import copy
from typing import Any

import kornia.augmentation as K
import pytest
import torch
from torch import nn

from gpuprefetch import StreamPrefetchLoader
from tests.kornia_modules.oracle import chain, crop, first, sequential
from tests.sources import images

pytestmark = pytest.mark.timeout(60)


def tensors_of(module: nn.Module) -> dict[str, Any]:
    """Note where a module's tensors are and what it remembers."""
    state: dict[str, Any] = {}
    for name, member in module.named_modules():
        for key, value in vars(member).items():
            if key in ("_modules", "_parameters", "_buffers"):
                continue
            if isinstance(value, torch.Tensor):
                value = (value.device, value.clone())
            state[f"{name}.{key}"] = repr(value)
    return state


@pytest.mark.parametrize("module", [crop, chain(), sequential("input")])
def test_the_users_module_is_neither_changed_nor_moved(
    device: torch.device, module: nn.Module
) -> None:
    module = copy.deepcopy(module)
    before = tensors_of(module)
    list(StreamPrefetchLoader(images(2, (2, 3, 20, 20)), module, device=device))
    assert tensors_of(module) == before


def test_a_change_of_the_module_counts_from_the_next_epoch_on() -> None:
    module = K.RandomHorizontalFlip(p=0.0)
    x = torch.rand(2, 3, 4, 4)
    loader = StreamPrefetchLoader([x], module, device="cpu")
    assert torch.equal(next(iter(loader)), x)
    module.p = module.p_batch = 1.0
    module.flip_only = True
    replaced = nn.Sequential(K.RandomHorizontalFlip(p=0.0))
    loader = StreamPrefetchLoader([x], replaced, device="cpu")
    assert torch.equal(next(iter(loader)), x)
    replaced[0] = K.RandomHorizontalFlip(p=1.0)
    assert torch.equal(next(iter(loader)), x.flip(-1))


def test_one_module_may_serve_the_loop_and_two_loaders_at_once(
    device: torch.device,
) -> None:
    module = chain()
    expected = first(torch.rand(4, 3, 20, 20), module, device=device)
    torch.manual_seed(0)
    x = torch.rand(4, 3, 20, 20)
    expected = first(x, module, device=device)
    passes = [
        iter(StreamPrefetchLoader([x] * 3, module, device=device, seed=5, depth=n))
        for n in (1, 3)
    ]
    for one in passes:
        got = next(one)
        module(torch.rand(2, 3, 30, 30))
        assert torch.equal(got, expected)
        next(one)


def test_a_module_with_parameters_gives_no_graph(device: torch.device) -> None:
    learnt = K.Normalize(
        torch.full((3,), 0.5, requires_grad=True), torch.full((3,), 0.5)
    )
    out = first(torch.rand(2, 3, 4, 4), learnt, device=device)
    assert not out.requires_grad


@pytest.mark.gpu
def test_a_module_that_was_moved_to_the_gpu_works_and_stays_there() -> None:
    module = chain().cuda()
    x = torch.rand(4, 3, 20, 20)
    expected = first(x, chain(), device="cuda")
    torch.testing.assert_close(first(x, module, device="cuda"), expected)
    assert all(value.device.type == "cuda" for value in module.buffers())


# The detector detects #


def test_meta_a_changed_module_is_seen() -> None:
    module = copy.deepcopy(crop)
    before = tensors_of(module)
    module(torch.rand(2, 3, 20, 20))
    assert tensors_of(module) != before
