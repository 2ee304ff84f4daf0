"""Read the pickles that CIFAR-10 comes in without letting them run anything.

A pickle names functions to be called and states to be set, so nothing of numpy is put in its hands: every
name it may use means a stand-in of ours, which has no attributes to set. Arrays are made when all is read.
"""

import pickle
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray


class _Dtype:
    """Stands for numpy.dtype, and for the one type it may make: uint8."""

    __slots__ = ()

    def __call__(self, name: Any, *_: Any) -> "_Dtype":
        if name not in ("u1", b"u1", "|u1", b"|u1"):
            raise pickle.UnpicklingError(f"arrays must be uint8, not {name!r}")
        return self

    def __setstate__(self, state: Any) -> None:
        """uint8 has nothing to set."""


class _Array:
    """Stands for an array while the pickle is read; whatever its state, it can only become one of uint8."""

    __slots__ = ("_state",)

    def __init__(self, *state: Any) -> None:
        self._state = state

    def __setstate__(self, state: Any) -> None:
        _version, shape, dtype, fortran, content = state
        self._state = (content, dtype, shape, "F" if fortran else "C")

    def build(self) -> NDArray[np.uint8]:
        content, dtype, shape, order = self._state
        if not isinstance(dtype, _Dtype):
            raise TypeError("arrays must be uint8")
        return np.frombuffer(content, np.uint8).reshape(shape, order=order)  # shares the bytes


class _Reconstruct:
    """Stands for the function that makes an empty array, whose state follows."""

    __slots__ = ()

    def __call__(self, *_: Any) -> _Array:
        return _Array()


class _FromBuffer:
    """Stands for the function by which protocol 5 makes an array at once."""

    __slots__ = ()

    def __call__(self, content: Any, dtype: Any, shape: Any, order: Any) -> _Array:
        return _Array(content, dtype, shape, order)


class _Encode:
    """Stands for `codecs.encode`, by which Python 3 writes bytes into an old pickle; latin1 only."""

    __slots__ = ()

    def __call__(self, text: str, encoding: str) -> bytes:
        if encoding != "latin1":
            raise pickle.UnpicklingError(f"encoding {encoding!r} is not allowed")
        return text.encode("latin1")


_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): None,  # named in calls, never called
    ("numpy", "dtype"): _Dtype(),
    ("_codecs", "encode"): _Encode(),
}
for _core in ("numpy.core", "numpy._core"):  # numpy 1 and 2
    _ALLOWED[f"{_core}.multiarray", "_reconstruct"] = _Reconstruct()
    _ALLOWED[f"{_core}.numeric", "_frombuffer"] = _FromBuffer()


class _ArrayUnpickler(pickle.Unpickler):
    """Knows arrays, numbers, texts, lists and dicts. Any other name in the file stops the reading."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a data file") from None


def read_dict(file: BinaryIO) -> dict[str, Any]:
    """The dict in a pickle of Python 2 or 3, its keys as text. Raises ValueError for anything else."""
    try:
        # "bytes" keeps the pixels of a Python 2 file as they are; "latin1" would make two more copies.
        return _as_dict(_ArrayUnpickler(file, encoding="bytes").load())
    except OSError:
        raise
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise ValueError(f"{type(error).__name__}: {error}") from None


def _as_dict(content: Any) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise TypeError(f"a dict is expected, not {type(content).__name__}")
    return {
        as_text(key): value.build() if isinstance(value, _Array) else value for key, value in content.items()
    }


def as_text(value: Any) -> str:
    """A text; Python 2 wrote its own as bytes."""
    if isinstance(value, bytes):
        return value.decode("latin1")
    if not isinstance(value, str):
        raise TypeError(f"a text is expected, not {type(value).__name__}")
    return value
