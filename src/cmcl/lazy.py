"""Names that are loaded when first used: those of a package (PEP 562), and a function of the user's."""

import os
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def attach(package: str, home: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package.

    Args:
        package: its `__name__`.
        home: public name -> the module in it that defines the name, or "" if the name is a module itself.
    """

    def get(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(f".{home[name] or name}", package)
        value = getattr(module, name) if home[name] else module
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted(sys.modules[package].__all__)


def import_function(name: str, subject: str) -> Callable[..., Any]:
    """A user's function, from a module in the current folder or an installed one."""
    module, _, function = name.partition(":")
    if not (module and function):
        raise ValueError(f"{subject} MODULE:FUNCTION, such as mynet:build. Got {name!r}.")
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)  # as `python -m` does
    try:
        found = getattr(import_module(module), function)
    except ModuleNotFoundError as error:
        raise ValueError(f"{module} must be a Python module, in {here} or installed. {error}.") from error
    except AttributeError as error:
        raise ValueError(f"{module} must have the function {function}. {error}.") from error
    if not callable(found):
        raise TypeError(f"{name} must be a function. Got {type(found).__name__}.")
    return found  # type: ignore[no-any-return]
