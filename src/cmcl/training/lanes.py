"""Faster ways to run independent calls: compiled, and each on a CUDA stream of its own."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..ensemble import in_turn
from ..telling import first_line, private_torch

Function = Callable[..., Any]


class Compiler:
    """Compiled versions of functions, made at the first call and shared by members that are alike."""

    def __init__(self) -> None:
        self._fast: dict[Function, Function] = {}
        self._warned = False

    def __call__(self, function: Function) -> Function:
        """The compiled version of a function; the plain one, after one warning, if it cannot be compiled."""
        if function not in self._fast:
            self._fast[function] = torch.compile(function, dynamic=False)

        def run(*args: Any, **options: Any) -> Any:
            try:
                return self._fast[function](*args, **options)
            except private_torch("torch._dynamo.exc.TorchDynamoException", RuntimeError) as error:
                self._fast[function] = function
                if not self._warned:  # where one cannot be compiled, the others often cannot either
                    self._warned, reason = True, first_line(getattr(error, "inner_exception", error))
                    warnings.warn(f"{function.__name__} runs uncompiled, and slower: {reason}", stacklevel=2)
                return function(*args, **options)

        return run


class _Joined(torch.autograd.Function):
    """Nothing, but on the way back it waits for all streams.

    The features that streams read were allocated on the main one. Autograd drops them as soon as a stream's
    last kernel that reads them is launched; without waiting, the main stream would write over them. Copies,
    because a network may begin with an operation in place, which views of several tensors do not allow.
    """

    @staticmethod
    def forward(ctx: Any, *features: Tensor) -> tuple[Tensor, ...]:
        return tuple(feature.clone() for feature in features)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients


def _joined(calls: list[partial[Any]]) -> list[partial[Any]]:
    """The same calls, whose arguments with a gradient went through `_Joined`."""
    places = [
        (c, i)
        for c, call in enumerate(calls)
        for i, value in enumerate(call.args)
        if isinstance(value, Tensor) and value.requires_grad
    ]
    if not places:
        return calls
    arguments = [list(call.args) for call in calls]
    together = _Joined.apply(*(arguments[c][i] for c, i in places))  # type: ignore[no-untyped-call]
    for (c, i), joined in zip(places, together, strict=True):
        arguments[c][i] = joined
    return [partial(call.func, *args, **call.keywords) for call, args in zip(calls, arguments, strict=True)]


class Lanes:
    """Independent calls side by side on CUDA streams; none: one after the other. See `Ensemble.run`."""

    def __init__(self, streams: int = 0, compiler: Compiler | None = None) -> None:
        self.streams = [torch.cuda.Stream() for _ in range(streams)]
        self.compiler = compiler

    def __call__(self, calls: list[partial[Any]]) -> list[Any]:
        """The results of the calls, in their order."""
        if self.compiler is not None:
            calls = [partial(self.compiler(call.func), *call.args, **call.keywords) for call in calls]
        if len(calls) != len(self.streams):
            return in_turn(calls)
        main, results = torch.cuda.current_stream(), []
        for call, stream in zip(_joined(calls), self.streams, strict=True):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                results.append(call())
        for stream in self.streams:
            main.wait_stream(stream)
        return results
