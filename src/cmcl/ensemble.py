"""An ensemble of members whose features are mixed at a named place.

M members, B batch, C classes. The member axis comes first, always: logits (M, B, C, ...).
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from . import _checks
from .data.transform import Transform
from .fidelity import can_compare, check_cut
from .members import Network, Output, build_members, distinct, in_turn, logits_of
from .modes import in_eval
from .prediction import Prediction, answer, notice_raw
from .sharing import MODES, share_features
from .split import split


class Ensemble(nn.Module):
    """M networks that see the same batch and, with `share_after`, each other's features (section 4.1).

    Args:
        network: a function that builds one member, called once for each; or a list of modules.
        members: how many to build (5 if not given).
        share_after: name of a submodule after which the members' features are mixed; "stem" for
            networks that offer `stem` and `trunk`. None: the members never meet.
        share_prob: lambda of the paper, the probability that a feature value is passed on.
        share_at_test: masks in eval mode: "expected", "sampled" or "off".
        output: picks the logits from what a member returns, where that is a dict, a tuple or the like.
    """

    classes: Sequence[str] | None = None  # their names, where they have any; `fit` takes them over

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
        self.members = nn.ModuleList(distinct(build_members(network, members)))
        self._share_after, self.output = share_after, output
        self.share_prob, self.share_at_test = float(share_prob), share_at_test
        self.transform: Transform | None = None  # of raw images; what is fitted to the data travels with it
        self.run: Callable[[list[partial[Any]]], list[Any]] = in_turn  # the engine has faster ways
        self._cut()

    @property
    def share_after(self) -> str | None:
        """Where features are shared; fixed, because the members are cut there."""
        return self._share_after

    def forward(
        self, x: Tensor, *, masks: Tensor | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        """Logits (M, B, C, ...) of inputs (B, ...). `masks` and `generator` go to `share_features`."""
        _checks.same_device("x", _checks.inputs(x, self.transform), next(self.parameters(), x))
        self._check_cut(x)
        return self._mixed(x, masks, generator)

    def _mixed(self, x: Tensor, masks: Tensor | None, generator: torch.Generator | None) -> Tensor:
        pairs = list(zip(self.members, self._halves, strict=True))
        parts = self.run([partial(halves.stem, member, x) for member, halves in pairs])
        mode = "off" if self.share_after is None else "sampled" if self.training else self.share_at_test
        share = partial(share_features, prob=self.share_prob, mode=mode, masks=masks, generator=generator)
        (mixed,) = self.run([partial(share, [h for h, _ in parts])])
        trunks = zip(pairs, mixed, parts, strict=True)
        calls = [partial(halves.trunk, member, h, rest) for (member, halves), h, (_, rest) in trunks]
        return torch.stack(logits_of(self.run(calls), self.output))  # (M, B, C, ...)

    @torch.no_grad()
    def predict(self, x: Tensor, *, batch_size: int | None = None) -> Prediction:
        """The answer for inputs (B, ...), uint8 if they are raw, in eval mode, streamed by `batch_size`."""
        batch_size = max(len(_checks.inputs(x)), 1) if batch_size is None else batch_size
        _checks.positive("batch_size", batch_size)
        device = next(self.parameters(), x).device
        with in_eval(self):
            parts = (self.transformed(part.to(device)) for part in torch.split(x, int(batch_size)))
            logits = torch.cat([self(part).to(x.device) for part in parts], 1)
        _checks.no_numbers(logits)
        notice_raw(x, self.transform)
        return answer(logits)

    def transformed(self, x: Tensor) -> Tensor:
        """Inputs as the networks see them: uint8 images go through `self.transform`, others stay."""
        return _checks.fitted(self.transform).transform(x) if x.dtype == torch.uint8 else x

    def save(self, path: str | Path, *, with_transform: bool = False) -> None:
        """Write a folder for `cmcl.load`, never a pickle; a large transform only if `with_transform`."""
        from .serialization import save

        save(self, path, with_transform=with_transform)

    def extra_repr(self) -> str:
        """Members, where features are shared, parameter counts."""
        shared = f"shared after {self.share_after!r} with probability {self.share_prob}"
        count = f"{len(self.members)} members, {sum(p.numel() for p in self.parameters()):,} parameters"
        return f"{count}, features {shared if self.share_after else 'not shared'}"

    def _cut(self) -> None:
        self._halves = [split(member, self.share_after) for member in self.members]
        self._checked: set[bool] = set()  # modes, train and eval

    def _check_cut(self, x: Tensor, **options: Any) -> None:  # once in each mode, if it was traced
        mode, traced = self.training, self._halves[0].traced
        if mode not in self._checked and traced and can_compare(x, self.parameters(), training=mode):
            self._checked.add(mode)
            options = {"place": str(self.share_after), "output": self.output} | options
            check_cut(self.members, self._in_pieces, x, **options)

    def _in_pieces(self, m: int, member: nn.Module, x: Tensor) -> Any:
        return self._halves[m].trunk(member, *self._halves[m].stem(member, x))

    def __getstate__(self) -> dict[str, Any]:  # the halves are made of code, which does not pickle
        return {key: value for key, value in self.__dict__.items() if key != "_halves"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._cut()
