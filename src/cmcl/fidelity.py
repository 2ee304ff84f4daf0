"""Does a network that was cut still compute what it does as a whole? Tried once, on copies of it.

Tracing sees what forward does with symbols. What it does otherwise with tensors (`isinstance(x, Tensor)`, an
exception that only a symbol raises) is found by running both: the same outputs, and the same gradients.
"""

import copy
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from .tracing import CannotCutError

TOLERANCE = 0.01  # of the values' norm; what is computed in another order differs by far less


def check_cut(network: nn.Module, cut: Callable[[nn.Module, Tensor], Any], x: Tensor, place: str) -> None:
    """Raises if `cut`, which runs the network in pieces, differs from the network on two examples of x.

    Nothing is touched: weights, buffers, random states. A network that cannot be copied, or fails by itself,
    is not judged.
    """
    try:
        with _apart_from_all(x):
            whole, pieces = copy.deepcopy(network), copy.deepcopy(network)
            expected = _answer(whole, whole, x)
    except Exception:  # whatever the network's own code raises: the user will see it where it belongs
        return
    try:
        with _apart_from_all(x):
            found = _answer(lambda part: cut(pieces, part), pieces, x)
    except Exception as error:
        raise CannotCutError(network, place, f"in two pieces it fails ({error})") from error
    for what, ours, theirs in zip(("outputs", "gradients"), found, expected, strict=True):
        if ours.shape != theirs.shape or (ours - theirs).norm() > TOLERANCE * theirs.norm():
            raise CannotCutError(
                network,
                place,
                f"in two pieces its {what} are others: forward decides something in Python that torch.fx "
                "cannot see",
            )


def can_check(x: Tensor) -> bool:
    """Are these numbers to compute with? Not while somebody traces, transforms or captures the ensemble."""
    return (
        not torch.compiler.is_compiling()
        and type(x) is Tensor
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)
        and torch._C._get_tracing_state() is None
        and not (x.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def _answer(run: Callable[[Tensor], Any], network: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """All outputs, and the gradients of all weights, each as one vector."""
    outputs = [t for t in tree_leaves(run(x[:2].detach().clone())) if isinstance(t, Tensor)]
    values = torch.cat([t.float().flatten() for t in outputs])
    weights = [p for p in network.parameters() if p.requires_grad]
    if not values.requires_grad or not weights:
        return values.detach(), values.new_zeros(0)
    mixed = values @ torch.arange(len(values), device=values.device).cos()  # no two outputs may cancel
    gradients = torch.autograd.grad(mixed, weights, allow_unused=True, materialize_grads=True)
    return values.detach(), torch.cat([g.float().flatten() for g in gradients])


@contextmanager
def _apart_from_all(x: Tensor) -> Iterator[None]:
    """With gradients, and with the same random numbers each time, which then are as they were before."""
    python, numpy = random.getstate(), sys.modules.get("numpy")
    state: Any = numpy.random.get_state() if numpy else None
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.random.fork_rng([x.device] if x.is_cuda else []),
    ):
        torch.default_generator.manual_seed(0)
        if x.is_cuda:
            torch.cuda.default_generators[x.device.index].manual_seed(0)
        random.seed(0)
        if numpy:
            numpy.random.seed(0)
        try:
            yield
        finally:
            random.setstate(python)
            if numpy:
                numpy.random.set_state(state)
