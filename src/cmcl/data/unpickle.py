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

_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_VALUES = {
    *("INT", "LONG", "LONG1", "BININT", "BININT1", "BININT2", "FLOAT", "BINFLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
}
_UINT8 = {"u1", "|u1"}
_MARK = object()
_MOST_OPCODES = 1_000_000  # a batch of 10,000 images has about 50,000


class _Name(str):
    """The name of a function: a value that can only be compared."""


@dataclass
class _Array:
    content: Any = b""
    dtype: Any = None
    shape: Any = ()
    order: Any = "C"

    def build(self) -> NDArray[np.uint8]:
        if self.dtype != "uint8":
            raise ValueError("arrays must be uint8")
        content = self.content.encode("latin1") if isinstance(self.content, str) else self.content
        return np.frombuffer(content, np.uint8).reshape(self.shape, order=self.order)


def read_dict(content: bytes) -> dict[str, Any]:
    """The dict in a pickle of Python 2 or 3. Raises ValueError for anything else."""
    try:
        result = _run(content)
        if not isinstance(result, dict):
            raise TypeError(f"a dict is expected, not {type(result).__name__}")
        return {
            _text(key): value.build() if isinstance(value, _Array) else value for key, value in result.items()
        }
    except (ValueError, TypeError, LookupError, OverflowError, AttributeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None


def _run(content: bytes) -> Any:
    stack: list[Any] = []
    memo: dict[Any, Any] = {}
    for opcode, argument, _ in islice(pickletools.genops(content), _MOST_OPCODES):
        name = opcode.name
        if name in _VALUES:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in {"PUT", "BINPUT", "LONG_BINPUT"}:
            memo[argument] = stack[-1]
        elif name in {"GET", "BINGET", "LONG_BINGET"}:
            stack.append(memo[argument])
        elif name == "STOP":
            return stack.pop()
        elif name not in {"PROTO", "FRAME"}:
            _operate(name, argument, stack)
    raise ValueError(f"more than {_MOST_OPCODES:,} opcodes")


def _operate(name: str, argument: Any, stack: list[Any]) -> None:
    """The opcodes that make something of the top of the stack."""
    if name == "MARK":
        stack.append(_MARK)
    elif name in {"EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE"}:
        stack.append({"EMPTY_DICT": {}, "EMPTY_LIST": [], "EMPTY_TUPLE": ()}[name])
    elif name in {"TUPLE", "LIST", "DICT"}:
        items = _pop_to_mark(stack)
        stack.append(tuple(items) if name == "TUPLE" else items if name == "LIST" else _set({}, items))
    elif name in {"TUPLE1", "TUPLE2", "TUPLE3"}:
        stack[-int(name[-1]) :] = [tuple(stack[-int(name[-1]) :])]
    elif name in {"APPEND", "APPENDS"}:
        items = _pop_to_mark(stack) if name == "APPENDS" else [stack.pop()]
        stack[-1].extend(items)
    elif name in {"SETITEM", "SETITEMS"}:
        items = _pop_to_mark(stack) if name == "SETITEMS" else [stack.pop(-2), stack.pop()]
        _set(stack[-1], items)
    elif name in {"GLOBAL", "STACK_GLOBAL"}:
        stack.append(_Name(argument or " ".join([stack.pop(-2), stack.pop()])))
    elif name == "REDUCE":
        arguments = stack.pop()
        stack.append(_reduce(stack.pop(), arguments))
    elif name == "BUILD":
        _build(stack.pop(), stack[-1])
    else:
        raise ValueError(f"the opcode {name} is not allowed in a data file")


def _pop_to_mark(stack: list[Any]) -> list[Any]:
    items: list[Any] = []
    while (item := stack.pop()) is not _MARK:
        items.append(item)
    return items[::-1]


def _set(target: Any, items: list[Any]) -> Any:
    for key, value in zip(items[::2], items[1::2], strict=True):
        target[_text(key)] = value
    return target


def _reduce(function: Any, arguments: Any) -> Any:
    module, _, name = function.rpartition(" ") if isinstance(function, _Name) else ("", "", "this")
    if (module, name) == ("_codecs", "encode") and arguments[1] == "latin1":
        return arguments[0].encode("latin1")  # how Python 3 writes bytes into an old pickle
    if (module, name) == ("numpy", "dtype"):
        if arguments[0] not in _UINT8:
            raise ValueError(f"arrays must be uint8, not {arguments[0]!r}")
        return _Name("uint8")
    if module in {"numpy.core.multiarray", "numpy._core.multiarray"} and name == "_reconstruct":
        return _Array()  # its state follows
    if module in {"numpy.core.numeric", "numpy._core.numeric"} and name == "_frombuffer":
        return _Array(*arguments)
    raise ValueError(f"a call of {module}.{name} is not allowed in a data file")


def _build(state: Any, target: Any) -> None:
    if isinstance(target, _Array):
        _version, target.shape, target.dtype, fortran, target.content = state
        target.order = "F" if fortran else "C"
    elif target != "uint8":  # whose state has nothing to set
        raise ValueError("a state is not allowed here")


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode("latin1")
    if not isinstance(value, str):
        raise TypeError(f"a string is expected, not {type(value).__name__}")
    return value
