"""The images of galleries that a page shows: what CMCL and its baseline predict for each of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..reproduction.gallery import Predictions, Scene
from .load import Run

KINDS = {  # of an image, by whether the averaged predictions are right
    "fixed": "fixed by {mine}",
    "broken": "broken by {mine}",
    "both": "wrong in both",
    "wrong": "wrong",
    "disputed": "disputed",
}
MOST = 24  # images of a kind


class Vote(NamedTuple):
    """A predicted class."""

    who: str
    label: str
    percent: int  # confidence
    right: bool
    chosen: bool  # by the lowest entropy, among the members


class Card(NamedTuple):
    """An image with a class, and its predictions by method."""

    index: int
    image: str
    label: str
    kind: str
    votes: Sequence[tuple[str, Sequence[Vote]]]


@dataclass(frozen=True)
class Examples:
    """Cards of a classification, with the numbers of all test images by kind."""

    intro: str
    counts: dict[str, tuple[str, int]]  # kind: (title, images of the test set)
    cards: Sequence[Card]

    @property
    def labels(self) -> list[str]:
        """The classes of the cards."""
        return sorted({card.label for card in self.cards})


def compared(runs: Sequence[Run]) -> Examples | None:
    """What CMCL (else the first run) fixed and broke of its baseline's predictions, of equal test images."""
    shown = [run for run in runs if run.gallery and not run.gallery.dense]
    if not shown:
        return None
    mine = next((run for run in shown if run.method == "cmcl"), shown[0])
    rivals = {run.method: run for run in reversed(shown) if run is not mine and _same_images(run, mine)}
    other = rivals.get("ie") or rivals.get("single")
    both = [mine, other] if other else [mine]
    predictions = [run.gallery.predictions for run in both if run.gallery]
    kinds = {kind: where for kind, where in _kinds(predictions).items() if where.any()}
    cards = _cards(both, predictions, kinds)
    counts = {kind: (KINDS[kind].format(mine=mine.title), int(where.sum())) for kind, where in kinds.items()}
    disputed = sum(card.kind == "disputed" for card in cards)
    if disputed:
        counts["disputed"] = (KINDS["disputed"], disputed)
    total = f"{len(predictions[0].targets):,} test images"
    intro = f"Predictions of {' and '.join(run.title for run in both)} for {total}, seed {mine.seed}. "
    if other:
        fixed, broken = (kinds[kind].sum() if kind in kinds else 0 for kind in ("fixed", "broken"))
        intro += f"{mine.title} fixes {fixed} errors of {other.title} and makes {broken} others. "
    intro += (
        f"Shown are up to {MOST} of a kind; disputed: the members contradict each other most confidently. "
        "◂ marks the most confident member."
    )
    return Examples(intro, counts, cards)


def _same_images(one: Run, other: Run) -> bool:
    targets = [run.gallery.predictions.targets for run in (one, other) if run.gallery]
    known = [run.record.checksums.get("test") for run in (one, other) if run.record]
    return np.array_equal(*targets) and len(set(known)) == 1


def _kinds(predictions: Sequence[Predictions]) -> dict[str, NDArray[np.bool_]]:
    """Which test images are of which kind."""
    mine, *others = (found.wrong for found in predictions)
    if not others:
        return {"wrong": mine}
    return {"fixed": others[0] & ~mine, "broken": mine & ~others[0], "both": mine & others[0]}


def _cards(
    runs: Sequence[Run], predictions: Sequence[Predictions], kinds: dict[str, NDArray[np.bool_]]
) -> list[Card]:
    found: dict[str, list[Card]] = {kind: [] for kind in (*kinds, "disputed")}
    seen: set[int] = set()
    for run in runs:
        assert run.gallery is not None
        for item in run.gallery.items:
            kind = next((kind for kind, where in kinds.items() if where[item.index]), "disputed")
            if item.index in seen or len(found[kind]) >= MOST:
                continue
            seen.add(item.index)
            names = run.gallery.classes
            votes = [
                (other.title, _votes(p, item.index, names)) for other, p in zip(runs, predictions, strict=True)
            ]
            label = names[predictions[0].targets[item.index]]
            found[kind].append(Card(item.index, run.gallery.embed(item.image), label, kind, votes))
    return [card for cards in found.values() for card in cards]


def _votes(found: Predictions, index: int, names: Sequence[str]) -> list[Vote]:
    """The averaged prediction, then each member's."""
    chosen = int(found.entropy[1:, index].argmin()) + 1
    rows = len(found.classes)
    return [
        Vote(
            f"member {row - 1}" if row else "average",
            names[found.classes[row, index]],
            round(100 * float(found.confidence[row, index])),
            bool(found.classes[row, index] == found.targets[index]),
            row == chosen and rows > 2,
        )
        for row in range(rows)
        if row == 0 or rows > 2
    ]


class Shot(NamedTuple):
    """A segmented image with the masks of each method's members."""

    name: str
    group: str
    image: str
    truth: str
    masks: Sequence[tuple[str, Sequence[tuple[str, float, bool, bool]]]]  # source, error, best, chosen


def scenes(runs: Sequence[Run]) -> list[Shot]:
    """Image, ground truth and members, for each image in a gallery of a segmentation."""
    items: dict[int, list[tuple[Run, Scene]]] = {}
    for run in runs:
        for item in run.gallery.items if run.gallery else ():
            if isinstance(item, Scene):
                items.setdefault(item.index, []).append((run, item))
    found = []
    for index, several in items.items():
        (first, item), masks = several[0], []
        assert first.gallery is not None
        for run, scene in several:
            assert run.gallery is not None
            best = min(mask.error for mask in scene.members)
            rows = [
                (run.gallery.embed(mask.mask), mask.error, mask.error == best, m == scene.chosen)
                for m, mask in enumerate(scene.members)
            ]
            masks.append((run.title, rows))
        pictures = first.gallery.embed(item.image), first.gallery.embed(item.truth)
        found.append(Shot(f"test image {index}", item.group or "", *pictures, masks))
    return found
