"""Read the pickles of CIFAR-10 without the `pickle` module, which would call whatever a file names.

A pickle is a program for a stack machine. The interpreter here knows the opcodes that dicts, lists, numbers,
strings and uint8 arrays need. It imports nothing and calls nothing; an unknown opcode or name raises.
"""

import pickletools
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

_VALUES = {
    *("INT", "LONG", "LONG1", "BININT", "BININT1", "BININT2", "FLOAT", "BINFLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
}
_MARK = object()
_MOST_OPCODES = 1_000_000  # a batch of 10,000 images has about 50,000


@dataclass
class _Name:
    """A function that the pickle names, such as "numpy dtype"."""

    name: str


@dataclass
class _Array:
    content: Any = b""
    dtype: Any = None
    shape: Any = ()
    order: Any = "C"

    def build(self) -> NDArray[np.uint8]:
        if self.dtype != _Name("uint8"):
            raise ValueError("arrays must be uint8")
        content = self.content.encode("latin1") if isinstance(self.content, str) else self.content
        return np.frombuffer(content, np.uint8).reshape(self.shape, order=self.order)


def read_dict(content: bytes) -> dict[str, Any]:
    """The dict in a pickle of Python 2 or 3. Raises ValueError for anything else."""
    try:
        result = _run(content)
        if not isinstance(result, dict):
            raise TypeError(f"a dict is expected, not {type(result).__name__}")
        return {key: value.build() if isinstance(value, _Array) else value for key, value in result.items()}
    except (ValueError, TypeError, LookupError, OverflowError, AttributeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None


def _run(content: bytes) -> Any:
    stack: list[Any] = []
    memo: dict[Any, Any] = {}
    for opcode, argument, _ in islice(pickletools.genops(content), _MOST_OPCODES):
        match opcode.name:
            case name if name in _VALUES:
                stack.append(argument)
            case "PROTO" | "FRAME":
                pass
            case "NONE" | "NEWTRUE" | "NEWFALSE" as name:
                stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[name])
            case "MEMOIZE" | "PUT" | "BINPUT" | "LONG_BINPUT":
                memo[len(memo) if argument is None else argument] = stack[-1]
            case "GET" | "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "MARK":
                stack.append(_MARK)
            case "EMPTY_DICT" | "EMPTY_LIST" | "EMPTY_TUPLE" as name:
                stack.append({"EMPTY_DICT": {}, "EMPTY_LIST": [], "EMPTY_TUPLE": ()}[name])
            case "DICT":
                stack.append(_set({}, _pop_to_mark(stack)))
            case "LIST":
                stack.append(_pop_to_mark(stack))
            case "TUPLE":
                stack.append(tuple(_pop_to_mark(stack)))
            case "TUPLE1" | "TUPLE2" | "TUPLE3" as name:
                stack[-int(name[-1]) :] = [tuple(stack[-int(name[-1]) :])]
            case "APPEND" | "APPENDS" as name:
                items = [stack.pop()] if name == "APPEND" else _pop_to_mark(stack)
                stack[-1].extend(items)
            case "SETITEM" | "SETITEMS" as name:
                items = [stack.pop(-2), stack.pop()] if name == "SETITEM" else _pop_to_mark(stack)
                _set(stack[-1], items)
            case "GLOBAL" | "STACK_GLOBAL":
                stack.append(_Name(argument or " ".join([stack.pop(-2), stack.pop()])))
            case "REDUCE":
                stack.append(_reduce(stack.pop(-2), stack.pop()))
            case "BUILD":
                _build(stack.pop(), stack[-1])
            case "STOP":
                return stack.pop()
            case name:
                raise ValueError(f"the opcode {name} is not allowed in a data file")
    raise ValueError(f"more than {_MOST_OPCODES:,} opcodes")


def _pop_to_mark(stack: list[Any]) -> list[Any]:
    items: list[Any] = []
    while (item := stack.pop()) is not _MARK:
        items.append(item)
    return items[::-1]


def _set(target: Any, items: list[Any]) -> Any:
    for key, value in zip(items[::2], items[1::2], strict=True):
        if not isinstance(key, str | bytes):  # anything else might be too deep to be hashed
            raise TypeError(f"a string is expected, not {type(key).__name__}")
        target[key if isinstance(key, str) else key.decode("latin1")] = value
    return target


def _reduce(function: Any, arguments: Any) -> Any:
    match function:
        case _Name("_codecs encode") if arguments[1] == "latin1":
            return arguments[0].encode("latin1")  # how Python 3 writes bytes into an old pickle
        case _Name("numpy dtype"):
            if arguments[0] not in ("u1", "|u1"):
                raise ValueError(f"arrays must be uint8, not {arguments[0]!r}")
            return _Name("uint8")
        case _Name("numpy.core.multiarray _reconstruct" | "numpy._core.multiarray _reconstruct"):
            return _Array()  # its state follows
        case _Name("numpy.core.numeric _frombuffer" | "numpy._core.numeric _frombuffer"):
            return _Array(*arguments)
    raise ValueError(f"a call of {getattr(function, 'name', 'this')} is not allowed in a data file")


def _build(state: Any, target: Any) -> None:
    if isinstance(target, _Array):
        _version, target.shape, target.dtype, fortran, target.content = state
        target.order = "F" if fortran else "C"
    elif target != _Name("uint8"):  # whose state has nothing to set
        raise ValueError("a state is not allowed here")
