"""An ensemble of M networks that see the same batch and share features (section 4.1), and its prediction.

M members, B batch, C classes. The member axis comes first, always: logits (M, B, C, ...).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from . import _checks
from .metrics import entropy
from .sharing import MODES, share_features
from .splitting import Split, Stem, Trunk, can_verify, split, verify

if TYPE_CHECKING:
    from .objectives import Part

Network = Callable[[], nn.Module] | Sequence[nn.Module]
Output = Callable[[Any], Tensor]  # what a member returns -> its logits (B, C, ...)


class Prediction(NamedTuple):
    """Probabilities of an ensemble and of its members."""

    probs: Tensor  # (B, C, ...)  mean of the members' probabilities, scaled by the temperature if any
    member_probs: Tensor  # (M, B, C, ...)
    entropy: Tensor  # (M, B)  of each member's prediction, in nats; pixel mean if dense
    chosen: Tensor  # (B,)  the most confident member: lowest entropy


def probabilities(logits: Tensor) -> Tensor:
    """The members' probabilities of logits (M, B, C, ...), in float32 or more."""
    return logits.softmax(2, dtype=torch.promote_types(logits.dtype, torch.float32))


def prediction(member_probs: Tensor, temperature: float | None = None) -> Prediction:
    """The prediction by the members' probabilities (M, B, C, ...)."""
    entropies = entropy(member_probs)
    probs = member_probs.mean(0)
    if temperature is not None:
        probs = scale_temperature(probs, temperature)
    return Prediction(probs, member_probs, entropies, entropies.argmin(0))


def scale_temperature(probs: Tensor, temperature: float) -> Tensor:
    """Probabilities (B, C, ...) raised to 1 / temperature and normalised; the order of classes stays."""
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be above 0. Got {temperature}. Fit it with fit_temperature().")
    tiny = torch.finfo(probs.dtype).tiny  # log 0 is no number
    return (probs.clamp(min=tiny).log() / temperature).softmax(1)


class Ensemble(nn.Module):
    """M networks that see the same batch and, with `share_after`, each other's features (section 4.1).

    `forward` runs the pieces `stems`, `share`, `trunks` and `logits`; a training loop may run them itself.

    Args:
        network: a function that builds one member, called once for each; or a list of modules.
        members: how many to build (5 if not given).
        share_after: name of the submodule after which features are shared; "stem" for networks with
            methods `stem` and `trunk`. None: nothing is shared.
        share_prob: lambda of the paper, the probability that a feature value is shared.
        share_at_test: masks in eval mode: "expected", "sampled" or "off".
        output: picks the logits from what a member returns, where that is a dict, a tuple or the like.
    """

    classes: Sequence[str] | None = None  # their names, if known; set by `fit`
    image_shape: tuple[int, ...] | None = None  # (C, H, W) of the Dataset that `fit` was given
    temperature: float | None = None  # of the averaged prediction, from calibration.fit_temperature
    frozen: Sequence[nn.Module] = ()  # what the last `fit` kept in eval mode; the next one keeps it too
    flip_at_test = False  # average the logits for images with those for their mirror images
    stems: list[Stem]  # of each member: stem(member, x) -> (features h, rest)
    trunks: list[Trunk]  # of each member: trunk(member, h, rest) -> output
    shared_stem: Stem | None = None  # runs once, with member 0, before the stems (see SharedStemEnsemble)
    freeze = False  # whether the shared stem is frozen

    def __init__(
        self,
        network: Network,
        members: int | None = None,
        *,
        share_after: str | None = None,
        share_prob: float = 0.7,
        share_at_test: str = "expected",
        output: Output | None = None,
    ) -> None:
        super().__init__()
        _checks.probability("share_prob", share_prob)
        _checks.choice("share_at_test", share_at_test, MODES)
        self.members = nn.ModuleList(_distinct(build_members(network, members)))
        self._share_after, self.output = share_after, output
        self.share_prob, self.share_at_test = float(share_prob), share_at_test
        self.transform: Any = None  # raw images -> inputs, of cmcl.data; saved with the ensemble
        self._set_pieces()

    @property
    def share_after(self) -> str | None:
        """The layer after which features are shared; fixed, because the members are split there."""
        return self._share_after

    def forward(
        self, x: Tensor, *, masks: Tensor | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        """Logits (M, B, C, ...) of inputs (B, ...). `masks` and `generator` go to `share_features`."""
        self.check(x)
        if self.shared_stem is not None:
            x, _ = self.shared_stem(self.members[0], x)
        stems = zip(self.stems, self.members, strict=True)
        features, rests = zip(*(stem(member, x) for stem, member in stems), strict=True)
        mixed = self.share(features, masks, generator)
        trunks = zip(self.trunks, self.members, mixed, rests, strict=True)
        return self.logits([trunk(member, h, rest) for trunk, member, h, rest in trunks])

    def share(
        self,
        features: Sequence[Tensor],
        masks: Tensor | None = None,
        generator: torch.Generator | None = None,
        part: "Part | None" = None,
    ) -> list[Tensor]:
        """The members' features (B, ...) after sharing, as by `share_features`."""
        mode = "off" if self.share_after is None else "sampled" if self.training else self.share_at_test
        return share_features(
            features, prob=self.share_prob, mode=mode, masks=masks, generator=generator, part=part
        )

    def logits(self, outputs: Sequence[Any]) -> Tensor:
        """Logits (M, B, C, ...) of what the members returned."""
        if self.output is not None:
            outputs = [self.output(output) for output in outputs]
        for m, output in enumerate(outputs):
            if not isinstance(output, Tensor) or output.ndim < 2:
                got, hint = _checks.kind(output), "wrap the network so that it returns its logits"
                if self.output is None and not isinstance(output, Tensor):
                    got, hint = _contents(output), f"pass output=, a function such as {_picks_logits(output)}"
                raise TypeError(
                    "members must return a tensor of logits (batch, classes, ...). "
                    f"Got {got} from member {m}; {hint}."
                )
            if output.shape != outputs[0].shape:
                raise ValueError(
                    "members must return logits of one shape. Got "
                    f"{tuple(outputs[0].shape)} from member 0 and {tuple(output.shape)} from member {m}."
                )
        return torch.stack(list(outputs))

    def check(self, x: Tensor) -> None:
        """Raise if x cannot be an input, or if a member computes something else in two pieces."""
        _checks.same_device("x", _checks.inputs(x), next(self.parameters(), x))
        self._verify(x)

    def predict(self, x: Tensor, *, batch_size: int | None = None, flip: bool | None = None) -> Prediction:
        """The prediction for inputs (B, ...) in eval mode, in parts of `batch_size`.

        If the ensemble has a `transform`, x are raw uint8 images, and it is applied to them. `flip` averages
        with mirror images, which costs as much again; None: as `flip_at_test` says.
        """
        batch_size = max(len(_checks.inputs(x)), 1) if batch_size is None else batch_size
        _checks.positive("batch_size", batch_size)
        device = next(self.parameters(), x).device
        parts = (self._prepared(part.to(device)) for part in torch.split(x, int(batch_size)))
        with in_eval(self):
            probs = [self.member_probs(part, flip=flip).to(x.device) for part in parts]
        return prediction(torch.cat(probs, 1), self.temperature)

    @torch.no_grad()
    def member_probs(self, x: Tensor, *, flip: bool | None = None) -> Tensor:
        """The members' probabilities (M, B, C, ...) of inputs (B, ...) in eval mode; `flip` as for `predict`.

        No transform is applied: x is what the networks take.
        """
        x = _checks.inputs(x).to(next(self.parameters(), x).device)
        with in_eval(self):
            logits = self.test_logits(x, flip=flip)
        _checks.no_numbers(logits)
        return probabilities(logits)

    def test_logits(self, x: Tensor, *, flip: bool | None = None) -> Tensor:
        """Logits (M, B, C, ...) as predictions use them; `flip` as for `predict`."""
        logits: Tensor = self(x)
        if not (self.flip_at_test if flip is None else flip):
            return logits
        if x.ndim != 4:
            raise ValueError(f"flip needs images (B, C, H, W). Got {tuple(x.shape)}. Leave out flip.")
        mirrored: Tensor = self(x.flip(-1))
        mirrored = mirrored.flip(-1) if logits.ndim > 3 else mirrored  # back, if dense
        return (logits + mirrored) / 2

    def save(self, path: str | Path, *, with_transform: bool = False) -> None:
        """Write a folder for `cmcl.load`, never a pickle; a large transform only if `with_transform`."""
        from .serialization import save

        save(self, path, with_transform=with_transform)

    def extra_repr(self) -> str:
        """Members, where features are shared, parameter counts."""
        shared = f"shared after {self.share_after!r} with probability {self.share_prob}"
        count = f"{len(self.members)} members, {sum(p.numel() for p in self.parameters()):,} parameters"
        return f"{count}, features {shared if self.share_after else 'not shared'}"

    def _prepared(self, x: Tensor) -> Tensor:
        if self.transform is None:
            return x
        if x.dtype != torch.uint8:
            raise TypeError(
                f"predict takes raw uint8 images if the ensemble has a transform. Got {_checks.kind(x)}. "
                "Pass the images before the transform, or call the ensemble itself, which does not transform."
            )
        inputs: Tensor = self.transform.transform(x)
        return inputs

    def _split(self) -> list[Split]:
        return [split(member, self.share_after) for member in self.members]

    def _set_pieces(self) -> None:
        pieces = self._split()
        self.stems, self.trunks = [piece.stem for piece in pieces], [piece.trunk for piece in pieces]
        # Modes in which the pieces are still to be compared with the whole networks: at the first call.
        self._unverified = {True, False} if any(piece.traced for piece in pieces) else set()

    def _verify(self, x: Tensor) -> None:
        mode = self.training
        if mode not in self._unverified or not can_verify(x, self.parameters(), training=mode):
            return
        self._unverified.remove(mode)
        name = str(self.share_after or getattr(self, "stem", None))
        kinds = zip(map(type, self.members), self.stems, self.trunks, strict=True)
        for m in {kind: m for m, kind in enumerate(kinds)}.values():  # one member of each architecture
            run, logits = partial(self._in_pieces, m), lambda output: self.logits([output])[0]
            verify(self.members[m], run, x, name=name, logits=logits, frozen=self.freeze)

    def _in_pieces(self, m: int, member: nn.Module, x: Tensor) -> Any:
        if self.shared_stem is not None:
            x, _ = self.shared_stem(member, x)
        return self.trunks[m](member, *self.stems[m](member, x))

    def __getstate__(self) -> dict[str, Any]:  # the pieces are code, which does not pickle
        pieces = ("stems", "trunks", "shared_stem")
        return {key: value for key, value in self.__dict__.items() if key not in pieces}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._set_pieces()


def build_members(network: Network, members: int | None) -> list[nn.Module]:
    """The modules of an ensemble: one call of `network` for each, or the list that was given."""
    must = "network must be a function that builds a member, or a list of modules"
    if isinstance(network, nn.Module) and not isinstance(network, nn.ModuleList):
        raise TypeError(
            f"{must}. Got one module, whose copies would all start from the same weights; "
            f"pass lambda: {type(network).__name__}(...)."
        )
    if isinstance(network, Sequence | nn.ModuleList) and not isinstance(network, str):
        modules = list(network)
        if members not in (None, len(modules)):
            raise ValueError(
                f"members must be {len(modules)}, the length of the list, or left out. Got {members}."
            )
    elif callable(network):
        _checks.positive("members", members := 5 if members is None else members)
        modules = [network() for _ in range(members)]
    else:
        raise TypeError(f"{must}. Got {_checks.kind(network)}.")
    if not modules:
        raise ValueError("network must give at least 1 member. Got an empty list.")
    for m, module in enumerate(modules):
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"members must be torch.nn.Module instances. Got {_checks.kind(module)} as member {m}."
            )
    return modules


def _distinct(members: list[nn.Module]) -> list[nn.Module]:
    """Members must start from different weights: equal ones would learn the same."""
    for m, n in combinations(range(len(members)), 2):
        if members[m] is members[n] or _equal_weights(members[m], members[n]):
            raise ValueError(
                f"members must start from different weights. Members {m} and {n} are the same; "
                "build a freshly initialised module for each (a function, not copies of one instance)."
            )
    return members


def _equal_weights(a: nn.Module, b: nn.Module) -> bool:
    ours, theirs = list(a.parameters()), list(b.parameters())
    if not ours or any(p.is_meta or isinstance(p, UninitializedParameter) for p in ours + theirs):
        return False  # nothing to compare yet
    if [p.shape for p in ours] != [q.shape for q in theirs]:
        return False
    return all(torch.equal(p, q.to(p.device)) for p, q in zip(ours, theirs, strict=True))


def _contents(output: Any) -> str:
    keys = f" with {', '.join(map(repr, output))}" if isinstance(output, Mapping) else ""
    return _checks.kind(output) + keys


def _picks_logits(output: Any) -> str:
    if isinstance(output, Mapping):
        return f"lambda out: out[{next(iter(output), 'logits')!r}]"
    return "lambda out: out[0]" if isinstance(output, Sequence) else "lambda out: out.logits"


@dataclass
class _EvalUsers:
    """How many threads need a module in eval mode, and what was in train mode before the first."""

    threads: int = 0
    training: list[nn.Module] = field(default_factory=list)


_users: WeakKeyDictionary[nn.Module, _EvalUsers] = WeakKeyDictionary()
_lock = Lock()


@contextmanager
def in_eval(module: nn.Module) -> Iterator[None]:
    """Eval mode for any number of threads: the first one sets it, the last one restores the modes.

    If each thread restored what it found, one would update batch statistics while another still computes.
    """
    with _lock:
        users = _users.setdefault(module, _EvalUsers())
        if users.threads == 0:
            users.training = [part for part in module.modules() if part.training]
            if users.training:
                module.eval()
        users.threads += 1
    try:
        yield
    finally:
        with _lock:
            users.threads -= 1
            if users.threads == 0:
                for part in users.training:
                    part.training = True
                del _users[module]
