"""Fine-tuning: members that start from one pretrained network, as copies or on a shared stem."""

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from . import _checks
from ._messages import first_line
from .ensemble import Ensemble, Network, Output, build_members
from .splitting import CannotSplitError, Split, parts_around, split


def from_pretrained(
    network: nn.Module,
    members: int = 5,
    *,
    head: str | Sequence[str],
    noise: float = 0.0,
    stem: str | None = None,
    freeze: bool = False,
    share_after: str | None = None,
    share_prob: float = 0.7,
    share_at_test: str = "expected",
    output: Output | None = None,
) -> Ensemble:
    """An ensemble whose members start from one pretrained network, each with a head of its own.

    Args:
        network: the pretrained network, with a head for your classes; it is copied.
        members: how many copies.
        head: names of the submodules whose weights each member draws anew, such as "fc".
        noise: standard deviation of normal noise added to all weights but the stem's, as a fraction of
            each tensor's own.
        stem: name of the submodule up to which all members are one network: see `SharedStemEnsemble`.
        freeze: the stem is not trained, and its batch statistics stay as they are.
        share_after, share_prob, share_at_test, output: as for `Ensemble`.
    """
    if not isinstance(network, nn.Module):
        raise TypeError(f"network must be one torch.nn.Module, pretrained. Got {_checks.kind(network)}.")
    if freeze and stem is None:
        raise ValueError("freeze must come with stem, the submodule up to which nothing learns. Got no stem.")
    if noise < 0:
        raise ValueError(f"noise must be 0 or more. Got {noise}.")
    _checks.positive("members", members)
    heads = [head] if isinstance(head, str) else list(head)
    _check_heads(network, heads)
    try:
        copies = [copy.deepcopy(network) for _ in range(members)]
    except Exception as error:
        raise ValueError(f"network must be one that can be copied. Got {first_line(error)}.") from error
    common = [] if stem is None else held_once(network, join_stems(copies, stem))
    for name in heads:
        if any(_is_in(key, [name]) for key in common):
            raise ValueError(
                f"head must come after the stem, which stays pretrained. Got {name!r}, of which "
                f"{stem!r} needs a part; name a later submodule, or an earlier stem."
            )
    for module in copies:
        drawn = {part for name in heads for part in module.get_submodule(name).modules()}
        for part in drawn:
            if (reset := _reset(part)) is not None:
                reset()
        _check_drawn(network, module, drawn)
        new = {p for part in drawn for p in part.parameters(recurse=False)}
        _add_noise([p for n, p in module.named_parameters() if n not in common and p not in new], noise)
    build = Ensemble if stem is None else partial(SharedStemEnsemble, stem=stem, freeze=freeze)
    return build(
        copies, share_after=share_after, share_prob=share_prob, share_at_test=share_at_test, output=output
    )


class SharedStemEnsemble(Ensemble):
    """An ensemble whose members are one network up to the submodule `stem`.

    The stem runs once for all members; `parameters()` and `state_dict()` hold it once. Features can be
    shared after a later submodule, `share_after`.

    Args:
        network: as for `Ensemble`. The stem is that of the first member.
        members: as for `Ensemble`.
        stem: name of a submodule; nothing but its output may be used after it.
        freeze: the stem is not trained. It stays in eval mode: no dropout, fixed batch statistics.
        settings: the other arguments of `Ensemble`.
    """

    def __init__(
        self,
        network: Network,
        members: int | None = None,
        *,
        stem: str,
        freeze: bool = False,
        **settings: Any,
    ) -> None:
        modules = build_members(network, members)
        self.stem, self.freeze = stem, freeze
        self._parts = join_stems(modules, stem)  # names of the stem's modules, parameters and buffers
        _check_later(modules[0], stem, settings.get("share_after"))
        super().__init__(modules, **settings)
        self.register_state_dict_post_hook(_name_once)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_name_for_all)  # type: ignore[no-untyped-call]
        if freeze:
            common = held_once(modules[0], self._parts)
            for name, p in modules[0].named_parameters():
                p.requires_grad_(p.requires_grad and name not in common)
            self.train()

    def train(self, mode: bool = True) -> Self:
        """Train or eval mode; a frozen stem stays in eval mode."""
        super().train(mode)
        if self.freeze:
            modules = dict(self.members[0].named_modules())
            for name in modules.keys() & set(self._parts):
                modules[name].eval()
        return self

    def _split(self) -> list[Split]:
        self.shared_stem = split(self.members[0], self.stem, frozen=self.freeze).stem
        return [split(member, self.share_after, start=self.stem) for member in self.members]


def join_stems(modules: Sequence[nn.Module], stem: str) -> list[str]:
    """Give all modules the first one's parts up to the submodule `stem`; returns the names of these parts."""
    first = modules[0]
    parts = _parts_before(first, stem)
    for m, other in enumerate(modules):
        _check_untied(other, parts, stem)
        if _kinds(other, _parts_before(other, stem)) != _kinds(first, parts):
            raise ValueError(f"members must be alike up to {stem!r}. Member {m} is not like member 0.")
        for part in parts:
            path, _, name = part.rpartition(".")
            setattr(other.get_submodule(path), name, getattr(first.get_submodule(path), name))
    return parts


def _parts_before(module: nn.Module, stem: str) -> list[str]:
    before, after = parts_around(module, stem, argument="stem")
    both = [part for part in after if _is_in(part, before)] + [part for part in before if _is_in(part, after)]
    if both:
        raise CannotSplitError(module, stem, f"{both[0]!r} is used before and after it")
    return before


def _kinds(module: nn.Module, parts: Sequence[str]) -> list[Any]:
    """The parts, and the classes of all modules in them."""
    modules = module.named_modules()
    return [*parts, *((name, type(part)) for name, part in modules if _is_in(name, parts))]


def _is_in(key: str, parts: Sequence[str]) -> bool:
    """Whether the key names one of the parts, or something inside one."""
    return any(f"{key}.".startswith(f"{part}.") for part in parts)


def held_once(member: nn.Module, parts: Sequence[str]) -> list[str]:
    """The keys in a member's state_dict that belong to the stem."""
    return [key for key in member.state_dict() if _is_in(key, parts)]


def _check_untied(module: nn.Module, parts: Sequence[str], stem: str) -> None:
    """Raise if a weight of the stem is tied to one after it, which each member has of its own."""
    weights = list(module.named_parameters(remove_duplicate=False))
    inside = {p: name for name, p in weights if _is_in(name, parts)}
    for name, p in weights:
        if p in inside and not _is_in(name, parts):
            raise CannotSplitError(module, stem, f"{inside[p]!r} before it and {name!r} are one tied weight")


def _check_later(member: nn.Module, stem: str, share_after: str | None) -> None:
    """Raise if features are shared where all members still have the same."""
    if share_after is None:
        return
    common, (before, _) = _parts_before(member, stem), parts_around(member, share_after)
    own = [part for part in before if not _is_in(part, common)]
    if not any(_is_in(name, own) for name, _ in member.named_parameters()):
        raise ValueError(
            f"share_after must come after weights of the members' own. Got {share_after!r}, where all have "
            f"the features of the stem {stem!r}; name a later submodule, or leave it out."
        )


def _name_once(ensemble: SharedStemEnsemble, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Keep the stem's weights under the first member's name only."""
    for key, _ in _doubles(ensemble, prefix):
        del state[key]


def _name_for_all(ensemble: SharedStemEnsemble, state: dict[str, Any], prefix: str, *others: Any) -> None:
    """Give every member the stem's weights again, before they are loaded."""
    for key, first in _doubles(ensemble, prefix):
        if first in state:
            state.setdefault(key, state[first])


def _doubles(ensemble: SharedStemEnsemble, prefix: str) -> list[tuple[str, str]]:
    """Names of the stem's weights in the other members, each with its name in the first member."""
    common = held_once(ensemble.members[0], ensemble._parts)
    others = range(1, len(ensemble.members))
    return [(f"{prefix}members.{m}.{key}", f"{prefix}members.0.{key}") for m in others for key in common]


def _check_heads(network: nn.Module, heads: Sequence[str]) -> None:
    known = dict(network.named_modules())
    for name in heads:
        if not name or name not in known:
            last = ", ".join(repr(key) for key, _ in list(network.named_children())[-3:])
            raise ValueError(
                f"head must name a submodule of {type(network).__name__}. Got {name!r}; last are {last}."
            )
        if not any(True for _ in known[name].parameters()):
            raise ValueError(f"head must have weights to draw anew. Got {name!r}, which has none.")


def _check_drawn(pretrained: nn.Module, member: nn.Module, drawn: set[nn.Module]) -> None:
    """Raise unless the weights of the modules in `drawn` are new, and all others are as they were.

    A layer may have no way to draw them, or compute its weight from others (spectral_norm, weight_norm,
    prune), which stay; a weight may be tied to one in another layer. Equal numbers, as of a normalisation,
    may come out again.
    """
    for (name, before), after in zip(pretrained.named_modules(), member.modules(), strict=True):
        weights = zip(before.named_parameters(name, recurse=False), after.parameters(False), strict=True)
        for (key, old), new in weights:
            if after in drawn and (_reset(after) is None or (old.equal(new) and new.min() < new.max())):
                raise ValueError(
                    "head must be layers that can draw their weights anew, by reset_parameters(). Got "
                    f"{key!r} of a {type(after).__name__}, which stays as it was; give the layer that "
                    "method, and use no spectral_norm, weight_norm or prune there."
                )
            if after not in drawn and not old.equal(new):
                raise ValueError(
                    "head must not be tied to what stays pretrained. Got a head whose weight is also "
                    f"{key!r}; give the head a weight of its own, or name both parts as head."
                )


def _reset(part: nn.Module) -> Any:
    return getattr(part, "reset_parameters", None) or getattr(part, "_reset_parameters", None)


@torch.no_grad()
def _add_noise(weights: Sequence[Tensor], noise: float) -> None:
    for w in weights if noise else []:
        w.add_(torch.randn_like(w), alpha=noise * w.std(correction=0).item())
