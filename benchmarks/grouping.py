"""Alike members as one network with grouped convolutions, against a stream for each: is it worth having?

    python benchmarks/grouping.py --network resnet20 [--members 5 25] [--inductor combo_kernels=True]

Both rows are the engine's own captured step of an independent ensemble; grouped, torch.vmap runs one member's
code over the stacked weights of all, which turns its convolutions into grouped ones. Its batch normalisation
is written out, because vmap does not follow cuDNN's. An experiment: the engine itself has streams only.

M members, B batch.
"""

import argparse
import ast
import copy
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from engine import BATCH, CMCL, fast_kernels, make_step
from torch import Tensor, nn
from torch.func import functional_call

from cmcl import Ensemble, Options, networks
from cmcl.networks.resnet import Shortcut
from cmcl.reproduction.environment import commit, device_name, versions
from cmcl.training.batches import Resident
from cmcl.training.cuda import Captured, Compiler, captured, execution
from cmcl.training.step import Step


class PlainNorm(nn.Module):
    """Batch normalisation in training mode, in operations that vmap knows."""

    def __init__(self, norm: nn.BatchNorm2d) -> None:
        super().__init__()
        self.weight, self.bias, self.eps, self.momentum = norm.weight, norm.bias, norm.eps, norm.momentum
        for name, buffer in norm.named_buffers():
            self.register_buffer(name, buffer)

    def forward(self, x: Tensor) -> Tensor:
        """Statistics in float32, whatever x is."""
        wide = x.float() if x.dtype.itemsize < 4 else x
        mean, variance = wide.mean((0, 2, 3)), wide.var((0, 2, 3), correction=0)
        n = x.numel() / x.shape[1]
        with torch.no_grad():
            kept, new = 1 - self.momentum, self.momentum  # vmap does not know lerp_
            self.running_mean.mul_(kept).add_(mean, alpha=new)
            self.running_var.mul_(kept).add_(variance, alpha=new * n / (n - 1))
            self.num_batches_tracked.add_(1)
        scale = self.weight * (variance + self.eps).rsqrt()
        return (wide * scale[:, None, None] + (self.bias - mean * scale)[:, None, None]).to(x.dtype)


def with_plain_norms(module: nn.Module) -> nn.Module:
    """The module, its batch normalisations written out."""
    for name, child in module.named_children():
        setattr(
            module, name, PlainNorm(child) if isinstance(child, nn.BatchNorm2d) else with_plain_norms(child)
        )
    return module


class Grouped:
    """Calls of alike members as one call, instead of `Runner`."""

    def __init__(self, ensemble: Ensemble, compiler: Compiler | None) -> None:
        members = list(ensemble.members)
        self.one = with_plain_norms(copy.deepcopy(members[0]))  # its code, with weights from outside
        self.parameters = [dict(member.named_parameters()) for member in members]
        self.buffers = [dict(member.named_buffers()) for member in members]
        self.whole = compiler(self._whole) if compiler else self._whole
        self.streams: list[Any] = []  # a step that cannot be captured gives them up

    def __call__(self, calls: list[partial[Any]]) -> list[Any]:
        """The results of the members' calls; other calls run as they are."""
        if len(calls) != len(self.parameters) or len(calls[0].args) < 3:  # stems that do nothing, sharing
            return [call() for call in calls]
        logits, buffers = self.whole(self.parameters, self.buffers, [call.args[1] for call in calls])
        with torch.no_grad():
            ours = [buffer for own in self.buffers for buffer in own.values()]
            torch._foreach_copy_(ours, [all_of_it[m] for m in range(len(calls)) for all_of_it in buffers])
        return list(logits)

    def _whole(
        self, parameters: list[dict[str, Tensor]], buffers: list[dict[str, Tensor]], inputs: list[Tensor]
    ) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """Logits of M members, and their buffers (M, ...) after it."""
        weights = {name: torch.stack([own[name] for own in parameters]) for name in parameters[0]}
        statistics = {name: torch.stack([own[name] for own in buffers]) for name in buffers[0]}
        run = torch.vmap(partial(functional_call, self.one), randomness="different")
        logits = run((weights, statistics), torch.stack(inputs))
        return logits.unbind(0), [value.detach() for value in statistics.values()]


class Fused(nn.Module):
    """Members fused horizontally, as HFTA does it: channels of all side by side, convolutions in M groups.

    For networks whose layers keep the channels of a member together: not for concatenated branches.
    """

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        self.count, self.network = len(members), fused(members)

    def forward(self, x: Tensor) -> Tensor:
        """Images (B, C, H, W) to logits (M, B, classes)."""
        logits: Tensor = self.network(x.repeat(1, self.count, 1, 1))
        return logits.unflatten(1, (self.count, -1)).transpose(0, 1)


class FusedLinear(nn.Module):
    """Linear layers: (B, M*I) to (B, M*O)."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.stack([layer.weight.detach().mT for layer in layers]))  # (M, I, O)
        self.bias = nn.Parameter(torch.stack([layer.bias.detach() for layer in layers])[:, None])

    def forward(self, x: Tensor) -> Tensor:
        """A batched matrix product."""
        own = x.unflatten(1, (len(self.weight), -1)).transpose(0, 1)
        return torch.baddbmm(self.bias, own, self.weight).transpose(0, 1).flatten(1)


class EachMember(nn.Module):
    """A layer without weights that adds channels: each member's on its own."""

    def __init__(self, layer: nn.Module, members: int) -> None:
        super().__init__()
        self.layer, self.members = layer, members

    def forward(self, x: Tensor) -> Tensor:
        """(B, M*C, ...) to (B, M*C', ...)."""
        apart: Tensor = self.layer(x.unflatten(1, (self.members, -1)).flatten(0, 1))
        return apart.unflatten(0, (-1, self.members)).flatten(1, 2)


def fused(alike: Sequence[nn.Module]) -> nn.Module:
    """The same module of all members as one."""
    first, m = alike[0], len(alike)
    if isinstance(first, nn.Linear):
        return FusedLinear(alike)
    if isinstance(first, Shortcut):
        return EachMember(first, m)
    new: nn.Module
    if isinstance(first, nn.Conv2d):
        size: Any = first.kernel_size, first.stride, first.padding, first.dilation, m * first.groups
        new = nn.Conv2d(m * first.in_channels, m * first.out_channels, *size, bias=first.bias is not None)
    elif isinstance(first, nn.BatchNorm2d):
        new = nn.BatchNorm2d(m * first.num_features, first.eps, first.momentum)
    else:
        new = copy.deepcopy(first)
        for name, _ in first.named_children():
            setattr(new, name, fused([getattr(module, name) for module in alike]))
        return new
    for name, value in new.state_dict().items():
        if value.ndim:  # not the number of batches
            value.copy_(torch.cat([module.state_dict()[name] for module in alike]))
    return new.to(next(first.parameters()).device)


def measure(asked: argparse.Namespace, members: int, *, grouped: bool) -> float:
    """Milliseconds a step."""
    torch.manual_seed(0)
    batch = asked.batch or BATCH[asked.network]
    recipe = replace(
        CMCL, members=members, method="ie", overlap=1, sharing=False, steps=10_000, batch_size=batch
    )
    ensemble = Ensemble(networks.NETWORKS[asked.network], members)
    images, targets = torch.randn(50 * batch, 3, 32, 32), torch.randint(10, (50 * batch,))
    options = Options(device=asked.device, quiet=True)

    chosen = dict(pair.split("=") for pair in asked.inductor)
    inductor = {name: ast.literal_eval(value) for name, value in chosen.items()}
    compiling = torch._inductor.config.patch(**inductor) if inductor else nullcontext()
    cuda = torch.device(asked.device).type == "cuda"
    how = {"precision": "bf16", "compile": True, "streams": True} if cuda else {}
    with fast_kernels(), execution(options, 0), compiling:
        step, batches = make_step(ensemble, (images, targets), recipe, options, **how)
        if grouped:
            step.run = Grouped(ensemble, Compiler() if cuda else None)  # type: ignore[assignment]
        return 1000 * seconds(captured(step) if cuda else step, batches, asked.steps)


def seconds(step: Step | Captured, batches: Resident, steps: int) -> float:
    """For one step, the mean of many after as many to warm up."""
    for _ in range(2):
        begun = time.perf_counter()
        for number in range(steps):
            if number % 40 == 0:
                batches.seek(0, 0)
            step()
        if batches.images.is_cuda:
            torch.cuda.synchronize()
        took = time.perf_counter() - begun
    return took / steps


def main() -> None:
    """Print a row for each number of members."""
    parser = argparse.ArgumentParser(description="Grouped members against a stream for each.")
    parser.add_argument("--network", choices=BATCH, default="resnet20")
    parser.add_argument("--members", type=int, nargs="+", default=[5, 25])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--inductor", nargs="*", default=[], help="settings of torch's compiler, NAME=VALUE")
    asked = parser.parse_args()
    print(f"$ python benchmarks/grouping.py --network {asked.network}", *asked.inductor)
    print(f"{device_name(torch.device(asked.device))}, torch {versions()['torch']}, commit {commit()}")
    print("members  streams ms/step  grouped ms/step  grouped/streams")
    for members in asked.members:
        streams, grouped = (measure(asked, members, grouped=way) for way in (False, True))
        print(f"{members:7}  {streams:15.3f}  {grouped:15.3f}  {grouped / streams:15.2f}", flush=True)


if __name__ == "__main__":
    main()
