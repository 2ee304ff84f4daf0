"""Does a network that was cut still compute what it does as a whole? Tried once, on copies of it.

Tracing sees what forward does with symbols. What it does otherwise with tensors (`isinstance(x, Tensor)`, an
exception that only a symbol raises) is found by running both: the same logits, and the same gradients.
"""

import copy
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from .telling import first_line, private_torch, tell
from .tracing import CannotCutError

TOLERANCE = 0.01  # of the values' norm; what is computed in another order differs by far less

Run = Callable[[nn.Module, Tensor], Any]


# Private in torch: without it, a transformed ensemble (torch.func) cannot be told from a plain one.
_is_wrapped = private_torch("torch._C._functorch.is_functorch_wrapped_tensor", lambda _: False)


def can_compare(x: Tensor, weights: Iterable[Tensor], *, training: bool) -> bool:
    """Are there numbers to compute with? Not while somebody traces, transforms or captures the ensemble."""
    return (
        not torch.compiler.is_compiling()
        and type(x) is Tensor
        and len(x) > training  # batch normalisation learns from no fewer than two
        and not any(map(_is_wrapped, (x, *weights)))
        and not torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]
        and not (x.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def check_cut(
    members: Iterable[nn.Module],
    in_pieces: Callable[[int, nn.Module, Tensor], Any],  # runs member m, or a copy of it
    x: Tensor,
    logits: Callable[[Any], Tensor],  # of what a member returns
    *,
    place: str,
    frozen: bool = False,  # the stem: it was cut in eval mode
) -> None:
    """Raises if a member in pieces is not what it is as a whole; the first of each kind is tried.

    Where that cannot be told, because the network cannot be copied or does not repeat itself, a warning
    says so.
    """
    first = {type(member): (m, member) for m, member in reversed(list(enumerate(members)))}
    for m, member in first.values():
        answer = partial(_answer, member, logits=logits, frozen=frozen)
        try:
            found = _difference(answer, partial(in_pieces, m), x)
        except (_Untold, torch.OutOfMemoryError) as error:
            reason = error if isinstance(error, _Untold) else "there is not enough memory"
            tell(
                f"{type(member).__name__} was cut after {place!r}; whether its pieces compute what it does "
                f"as a whole was not found out: {reason}."
            )
            continue
        if found is not None:
            raise CannotCutError(member, place, f"in two pieces {found}")


class _Untold(Exception):
    """Why the pieces could not be compared with the whole."""


Answer = tuple[Tensor, Tensor]


def _difference(answer: Callable[[Run, Tensor], Answer], in_pieces: Run, x: Tensor) -> str | None:
    """How the pieces differ; None: not at all, or the network fails by itself, which the user will see."""
    for some in (x[:2], x):  # two examples are enough, unless the network asks for more
        try:
            expected, again = (answer(nn.Module.__call__, some) for _ in range(2))
            break
        except (_Untold, torch.OutOfMemoryError):
            raise
        except Exception:
            continue
    else:
        return None
    if any(map(_differ, expected, again)):
        raise _Untold("it does not repeat itself")
    try:
        found = answer(in_pieces, some)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return f"it fails ({error})"
    for what, ours, theirs in zip(("outputs", "gradients"), found, expected, strict=True):
        if _differ(ours, theirs):
            return (
                f"its {what} are others: forward decides something in Python that torch.fx cannot see, or "
                "the mode or an attribute of a block was changed after the ensemble was built"
            )
    return None


def _differ(ours: Tensor, theirs: Tensor) -> bool:
    return ours.shape != theirs.shape or bool((ours - theirs).norm() > TOLERANCE * theirs.norm())


def _answer(
    member: nn.Module, run: Run, x: Tensor, *, logits: Callable[[Any], Tensor], frozen: bool
) -> Answer:
    """The logits, and the gradients of all weights, each as one vector; of a copy."""
    with _apart_from_all(x):
        try:
            own = copy.deepcopy(member)
        except Exception as error:
            raise _Untold(f"it cannot be copied ({first_line(error)})") from error
        if frozen:
            own.eval()
        for zeros in [p for p in own.parameters() if not p.any()]:
            nn.init.normal_(zeros, std=0.1)  # a head that starts at zero would hide all before it
        values = logits(run(own, x.detach().clone())).float().flatten()
        weights = [p for p in own.parameters() if p.requires_grad and p.is_leaf]  # a copied script's are not
        if not values.requires_grad or not weights:
            return values.detach(), values.new_zeros(0)
        mixed = values @ torch.arange(len(values)).cos().to(values)  # no two logits may cancel
        mixed.backward()  # not autograd.grad, which a reentrant checkpoint refuses
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in weights]
        return values.detach(), torch.cat([g.to_dense().float().flatten() for g in gradients])


@contextmanager
def _apart_from_all(x: Tensor) -> Iterator[None]:
    """With gradients, no one looking on, and the same random numbers each time; then all is as it was."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002  networks draw from it
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        saved_tensors_hooks(lambda t: t, lambda t: t),  # not the caller's, who may be checkpointing
        torch.random.fork_rng([x.device] if x.is_cuda else []),
    ):
        torch.default_generator.manual_seed(0)
        if x.is_cuda:
            torch.cuda.default_generators[x.device.index].manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002
