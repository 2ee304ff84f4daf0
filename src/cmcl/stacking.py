"""Members as one: alike networks of linear layers computed together, by batched matrix products.

A copy of one member gets the weights of all: those of a linear layer are (M, O, I), and it returns (M, B, O).
The rest of the network's own code then computes all members at once, if it works along the last axis only.
`stackable` tries that and compares. Any other network runs as M modules.

M members, B batch, I inputs and O outputs of a layer.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .ensemble import Ensemble
from .splitting import attributes, check_side_effects, copied, differ, isolated, problem, random_states


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
    """The members of an ensemble as one network, whose parameters are (M, ...).

    The members' own parameters become views of them: what trains one trains the other.
    """

    def __init__(self, ensemble: Ensemble) -> None:
        self.ensemble = ensemble
        members = list(ensemble.members)
        layers = zip(*(member.modules() for member in members), strict=True)
        stacks: dict[int, Any] = {id(own[0]): StackedLinear(own) for own in layers if _is_linear(own[0])}
        self.network: nn.Module = copy.deepcopy(members[0], stacks)  # with these instead of its layers
        # of each member's parameter: the stacked one, and its place there
        self.places: dict[nn.Parameter, tuple[nn.Parameter, int]] = {}
        for name, whole in self.network.named_parameters():
            for m, member in enumerate(members):
                own = member.get_parameter(name)
                own.data = whole.data[m]
                self.places[own] = whole, m

    def stem(self, x: Tensor) -> tuple[Tensor, Any]:
        """Features (M, B, ...) of inputs (B, ...), and what else the trunk needs."""
        return self.ensemble.stems[0](self.network, x)

    def trunk(self, h: Tensor, rest: Any) -> Any:
        """What the members return for their features, stacked."""
        return self.ensemble.trunks[0](self.network, h, rest)

    def logits(self, x: Tensor) -> Tensor:
        """`Ensemble.forward`: logits (M, B, C, ...) of inputs (B, ...)."""
        h, rest = self.stem(x)
        if self.ensemble.share_after is not None:
            h = torch.stack(self.ensemble.share(h.unbind()))
        output = self.trunk(h, rest)
        logits: Tensor = output if self.ensemble.output is None else self.ensemble.output(output)
        return logits

    def release(self) -> None:
        """Give the members' parameters memory of their own again."""
        for own in self.places:
            own.data = own.data.clone()


def stackable(ensemble: Ensemble, x: Tensor) -> bool:
    """Whether `Stacked` computes what the members compute, tried on copies with inputs (B, ...)."""
    members = list(ensemble.members)
    parameters = [p for member in members for p in member.parameters()]
    if (
        ensemble.shared_stem is not None
        or len({repr(member) for member in members}) > 1
        or len({(*map(id, pieces),) for pieces in zip(ensemble.stems, ensemble.trunks, strict=True)}) > 1
        or len(set(parameters)) < sum(len(list(m.parameters(False))) for m in ensemble.members.modules())
        or any(True for _ in ensemble.buffers())
        or not all(_is_linear(m) or not list(m.parameters(False)) for m in ensemble.members.modules())
        or any(problem(part) for part in ensemble.members.modules())
    ):
        return False
    try:
        return all(_computes_the_same(ensemble, x, training=mode) for mode in (True, False))
    except Exception:  # whatever the network's own code raises on other shapes
        return False


def pays(ensemble: Ensemble, batch: int) -> bool:
    """Whether stacked members train faster on a CPU: small layers do, where calls cost more than arithmetic.

    Larger ones stay in the cache if members run in turn; the limits are from `benchmarks/peers.py sizes`.
    """
    layers = [layer for layer in ensemble.modules() if isinstance(layer, nn.Linear)]
    return all(layer.weight.numel() <= 2**15 and batch * layer.out_features <= 2**14 for layer in layers)


def _computes_the_same(ensemble: Ensemble, x: Tensor, *, training: bool) -> bool:
    trial = copied(ensemble)
    assert isinstance(trial, Ensemble)
    trial.train(training)
    for part in trial.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.eval()  # it draws other numbers for stacked features
    stacked = Stacked(trial)
    with isolated(x):
        logits = trial(x)
        h, _ = trial.stems[0](trial.members[0], x)
    with isolated(x):
        before, python = attributes(stacked.network), random_states()[1:]
        ours = stacked.logits(x)
        check_side_effects(before, attributes(stacked.network), drawn=python != random_states()[1:])
        each = stacked.stem(x)[0].shape  # whatever is shared, one for each member
    apart = trial.share_after is None or each == (len(trial.members), *h.shape)
    return apart and not differ(ours, logits)


def _is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear
