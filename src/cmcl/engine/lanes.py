"""Faster ways to run independent calls: compiled, and each on a CUDA stream of its own."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..ensemble import in_turn

Function = Callable[..., Any]


class Compiler:
    """Compiled versions of functions, made at the first call and shared by members that are alike."""

    def __init__(self) -> None:
        self._fast: dict[Function, Function] = {}

    def __call__(self, function: Function) -> Function:
        """The compiled version of a function; the plain one, after one warning, if it cannot be compiled."""
        if function not in self._fast:
            self._fast[function] = torch.compile(function, dynamic=False)

        def run(*args: Any, **options: Any) -> Any:
            try:
                return self._fast[function](*args, **options)
            except torch._dynamo.exc.TorchDynamoException as error:
                reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
                warnings.warn(f"{function.__name__} runs uncompiled, and slower: {reason}", stacklevel=2)
                self._fast[function] = function
                return function(*args, **options)

        return run


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
        for call, stream in zip(calls, self.streams, strict=True):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                results.append(call())
        for stream in self.streams:
            main.wait_stream(stream)
        return results
