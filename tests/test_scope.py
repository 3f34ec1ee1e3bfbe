"""Do copies and transforms run under their own modes, and does the loop keep its?"""

import pytest
import torch

from gpuprefetch.scope import transform_modes

CPU = torch.device("cpu")


def modes() -> tuple[bool, bool, bool]:
    """Whether gradients, inference mode and autocast are on."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
    )


@pytest.mark.parametrize("is_inference", [False, True])
@pytest.mark.parametrize("is_autocast", [False, True])
@pytest.mark.parametrize("has_grad", [False, True])
def test_a_block_has_no_modes_and_gives_back_the_loops(
    has_grad: bool, is_autocast: bool, is_inference: bool
) -> None:
    own = transform_modes(CPU)
    with (
        torch.set_grad_enabled(has_grad),
        torch.autocast("cpu", enabled=is_autocast),
        torch.inference_mode(is_inference),
    ):
        before = modes()
        for _ in range(2):
            with own:
                assert modes() == (False, False, False)
                with own, torch.enable_grad():
                    assert modes() == (True, False, False)
                assert modes() == (False, False, False)
            assert modes() == before


def test_an_interrupt_while_a_block_begins_leaves_the_loops_modes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = transform_modes(CPU)

    def interrupt(device_type: str) -> bool:
        raise KeyboardInterrupt

    with torch.inference_mode():
        before = modes()
        with monkeypatch.context() as patched:
            patched.setattr(torch, "is_autocast_enabled", interrupt)
            with pytest.raises(KeyboardInterrupt), own:
                raise AssertionError("the block must not run")
        assert modes() == before
    assert modes() == (True, False, False)
    with own:
        assert modes() == (False, False, False)
    assert modes() == (True, False, False)


def test_a_device_type_without_autocast_is_no_obstacle() -> None:
    with transform_modes(torch.device("meta")):
        assert modes() == (False, False, False)
