"""Members as one: chains of linear layers computed together, by batched matrix products.

A copy of one member gets the weights of all: those of a linear layer are (M, O, I), and it returns (M, B, O).
Element-wise layers work on that as they are. Any other network runs as M modules.

M members, B batch, I inputs and O outputs of a layer.
"""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .ensemble import Ensemble
from .splitting import has_hooks, problem

DROPOUT = (nn.Dropout, nn.AlphaDropout)
ELEMENTWISE = (
    *(nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish),
    *(
        nn.Tanh,
        nn.Hardtanh,
        nn.Sigmoid,
        nn.Hardsigmoid,
        nn.LogSigmoid,
        nn.Softplus,
        nn.Softsign,
        nn.Hardswish,
    ),
)


class StackedLinear(nn.Linear):
    """The linear layers of M members: (B, I), or (M, B, I), to (M, B, O)."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layers[0].in_features, layers[0].out_features
        self.weight = _stack([layer.weight for layer in layers])
        biases = [layer.bias for layer in layers if layer.bias is not None]
        self.bias = _stack(biases) if biases else None  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        """What each member's layer computes of its own input, or of one that is the same for all."""
        x = x.expand(len(self.weight), *x.shape) if x.ndim == 2 else x
        # W @ x, not x @ W: then the gradient of W has the memory layout of W
        if self.bias is None:
            return torch.bmm(self.weight, x.mT).mT
        return torch.baddbmm(self.bias[..., None], self.weight, x.mT).mT


def _stack(parameters: Sequence[Tensor]) -> nn.Parameter:
    values = torch.stack([parameter.detach() for parameter in parameters])
    return nn.Parameter(values, requires_grad=parameters[0].requires_grad)


class Stacked:
    """The members of an ensemble as one network in train mode, whose parameters are (M, ...).

    The members' own parameters become views of them: what trains one trains the other.
    """

    def __init__(self, ensemble: Ensemble) -> None:
        self.ensemble = ensemble
        members = list(ensemble.members)
        layers = zip(*(member.modules() for member in members), strict=True)
        stacks: dict[int, Any] = {
            id(own[0]): StackedLinear(own) for own in layers if type(own[0]) is nn.Linear
        }
        self.network: nn.Module = copy.deepcopy(members[0], stacks).train()  # with these, not its layers
        # of each member's parameter: the stacked one, and the row there
        self.rows: dict[nn.Parameter, tuple[nn.Parameter, int]] = {}
        for name, whole in self.network.named_parameters():
            for m, member in enumerate(members):
                own = member.get_parameter(name)
                own.data = whole.data[m]
                self.rows[own] = whole, m

    def logits(self, x: Tensor) -> Tensor:
        """`Ensemble.forward`: logits (M, B, C) of inputs (B, ...)."""
        ensemble = self.ensemble
        h, rest = ensemble.stems[0](self.network, x)
        if ensemble.share_after is not None:
            h = torch.stack(ensemble.share(h.unbind()))
        logits: Tensor = ensemble.trunks[0](self.network, h, rest)
        return logits

    def release(self) -> None:
        """Give the members' parameters memory of their own again."""
        for own in self.rows:
            own.data = own.data.clone()


def stackable(ensemble: Ensemble, x: Tensor) -> bool:
    """Whether the members are alike chains of layers that `Stacked` knows, for inputs (B, ...)."""
    members = list(ensemble.members)
    parts = list(ensemble.members.modules())
    linear = [part for member in members for part in member.modules() if type(part) is nn.Linear]
    own = [p for layer in linear for p in (layer.weight, layer.bias) if p is not None]
    trained = {tuple(p.requires_grad for p in member.parameters()) for member in members}
    return (
        ensemble.output is None
        and ensemble.shared_stem is None
        and len({repr(member) for member in members}) == len(trained) == 1
        and _is_chain(members[0], x, ensemble.share_after)
        # nothing but these layers has parameters, no two of them the same, and none is more than that
        and len(own) == len(set(own))
        and set(own) == set(ensemble.parameters())
        and not any(True for _ in ensemble.buffers())
        and len({(p.dtype, p.device, type(p)) for p in own}) == 1
        and not any(map(has_hooks, own))
        and not any(map(problem, parts))
    )


def _is_chain(member: nn.Module, x: Tensor, share_after: str | None) -> bool:
    layers = list(_layers(member))
    kinds = [type(layer) for layer in layers]
    if nn.Linear not in kinds:
        return False
    first = kinds.index(nn.Linear)
    flat = [layer for layer in layers[:first] if isinstance(layer, nn.Flatten)]
    shared = set(member.get_submodule(share_after or "").modules())
    # Before the first linear layer all members compute the same: nothing may be drawn or shared there.
    return (
        (bool(flat) or x.ndim == 2)
        and all((layer.start_dim, layer.end_dim) == (1, -1) for layer in flat)
        and all(kind in (*ELEMENTWISE, nn.Flatten) for kind in kinds[:first])
        and all(kind in (*ELEMENTWISE, *DROPOUT, nn.Linear) for kind in kinds[first:])
        and not shared.isdisjoint(layers[first:])
    )


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """The layers of nested `nn.Sequential`, in the order in which they run."""
    if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
        for part in module:
            yield from _layers(part)
    else:
        yield module


def pays(ensemble: Ensemble, batch: int) -> bool:
    """Whether stacked members train faster on a CPU: small layers do, where calls cost more than arithmetic.

    Larger ones stay in the cache if members run in turn; the limits are from `benchmarks/peers.py sizes`.
    """
    layers = [layer for layer in ensemble.modules() if isinstance(layer, nn.Linear)]
    return all(layer.weight.numel() <= 2**15 and batch * layer.out_features <= 2**14 for layer in layers)
