"""Does a module still do what its class, or Kornia's class of it, does?

A method may have been replaced on the module itself, or by a subclass.
"""

from inspect import getattr_static
from types import FunctionType
from typing import Any

from torch import nn

__all__ = ["keeps_all_methods_of", "keeps_method_of", "what_changed"]

# What a subclass may have of its own without changing what its parent does to images.
_HARMLESS = frozenset(
    {"__annotations__", "__dict__", "__doc__", "__firstlineno__", "__init__"}
    | {"__init_subclass__", "__module__", "__repr__", "__static_attributes__"}
    | {"__subclasshook__", "__weakref__"}
)


def what_changed(module: nn.Module) -> str:
    """What was changed on this very module, besides its settings; empty: nothing."""
    hooks = module._forward_hooks, module._forward_pre_hooks
    if any(hooks):
        return "it has hooks"
    for name, value in vars(module).items():
        is_method = callable(value) and callable(getattr(type(module), name, None))
        # The loader's own copies check a crop's size there, and take shortcuts.
        if is_method and not type(value).__module__.startswith("gpuprefetch."):
            return f"its {name} was replaced"
    return ""


def keeps_all_methods_of(kind: type, module: nn.Module) -> bool:
    """Whether a module of a subclass does to images what its parent does.

    Args:
        kind: The parent, one of Kornia's classes.
        module: Of a class below it, or of that class.
    """
    return not what_changed(module) and all(
        name in _HARMLESS or keeps_method_of(kind, module, name) for name in dir(kind)
    )


def keeps_method_of(kind: type, module: nn.Module, name: str) -> bool:
    """Whether one method or attribute of a module's class is its parent's.

    Args:
        kind: The parent, one of Kornia's classes.
        module: Of a class below it, or of that class.
        name: Of the attribute.
    """
    return _is_same(_find(type(module), name), _find(kind, name))


def _find(kind: type, name: str) -> Any:
    return getattr_static(kind, name, None)


def _is_same(own: Any, parents: Any) -> bool:
    """Kornia gives each subclass a copy of an inherited ``forward``: the same code."""
    if own is parents:
        return True
    if not isinstance(own, FunctionType) or not isinstance(parents, FunctionType):
        return False
    one, other = own.__code__, parents.__code__
    return (one.co_filename, one.co_firstlineno, one.co_code) == (
        *(other.co_filename, other.co_firstlineno),
        other.co_code,
    )
