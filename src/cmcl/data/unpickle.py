"""Read the pickles that CIFAR-10 comes in without letting them run anything."""

import pickle
from typing import Any, BinaryIO

import numpy as np

# numpy moves these functions between modules from version to version; an array itself knows where they are.
_RECONSTRUCT = np.empty(0).__reduce__()[0]
_FROMBUFFER = np.empty(0).__reduce_ex__(5)[0]


def _encode_latin1(text: str, encoding: str) -> bytes:
    """Stands for `codecs.encode`, by which Python 3 writes bytes into an old pickle; latin1 only."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"encoding {encoding!r} is not allowed")
    return text.encode("latin1")


_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,  # numpy 1
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,  # numpy 2
    ("numpy.core.numeric", "_frombuffer"): _FROMBUFFER,
    ("numpy._core.numeric", "_frombuffer"): _FROMBUFFER,
    ("_codecs", "encode"): _encode_latin1,
}


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
        # "bytes" hands the pixels of a Python 2 file to numpy uncopied; "latin1" would make two more copies.
        content = _ArrayUnpickler(file, encoding="bytes").load()
    except OSError:
        raise
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise ValueError(f"{type(error).__name__}: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"a dict is expected, not {type(content).__name__}")
    return {as_text(key): value for key, value in content.items()}


def as_text(value: Any) -> str:
    """Python 2 wrote its texts as bytes."""
    return value.decode("latin1") if isinstance(value, bytes) else str(value)
