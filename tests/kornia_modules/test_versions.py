"""Which versions of Kornia are accepted, and what is said of the others?"""

import kornia
import kornia.augmentation as K
import pytest

from gpuprefetch import DependencyError, StreamPrefetchLoader
from tests.children import run_script
from tests.kornia_modules.oracle import first
from tests.sources import images

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("version", ["0.8.3", "0.7.0", "0.8.3.dev1"])
def test_an_old_kornia_is_refused(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(kornia, "__version__", version)
    loader = StreamPrefetchLoader(images(1), K.RandomHorizontalFlip(), device="cpu")
    with pytest.raises(
        DependencyError, match=rf"kornia {version}.* 0\.9 or newer.*pip install"
    ):
        iter(loader)


@pytest.mark.parametrize("version", ["0.9.0", "0.10.1", "1.0", "1.0.0rc1", "0.9.0rc1"])
def test_a_newer_kornia_is_accepted(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(kornia, "__version__", version)
    (x,) = images(1)
    assert first(x, K.RandomHorizontalFlip(p=0.0)).shape == x.shape


def test_a_missing_kornia_says_what_to_install() -> None:
    out = run_script(
        """
        import sys
        sys.modules["kornia"] = None
        from gpuprefetch import DependencyError
        try:
            from gpuprefetch.augment.kornia_adapter import import_kornia
            import_kornia()
        except DependencyError as error:
            print(error)
        """
    )
    assert "kornia" in out
    assert "pip install" in out
