"""The images of galleries that a page shows: what CMCL and its baseline predict for each of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..reproduction.gallery import Gallery, Predictions, Scene
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

    label: str
    percent: int  # confidence
    right: bool
    chosen: bool  # by the lowest entropy, among the members


class Card(NamedTuple):
    """An image with a class, and its predictions by method."""

    image: str
    label: str
    kind: str
    votes: Mapping[str, Sequence[Vote]]  # the averaged prediction, then each member's
    name: str


@dataclass(frozen=True)
class Examples:
    """Cards of a classification, with the numbers of all test images by kind."""

    intro: str
    counts: Mapping[str, tuple[str, int]]  # kind: (title, images of the test set)
    cards: Sequence[Card]


def compared(runs: Sequence[Run]) -> Examples | None:
    """What CMCL (else the first run) fixed and broke of its baseline's predictions, of equal test images."""
    shown = [(run, run.gallery) for run in runs if run.gallery and not run.gallery.dense]
    if not shown:
        return None
    mine = next((pair for pair in shown if pair[0].method == "cmcl"), shown[0])
    others = [pair for pair in reversed(shown) if pair is not mine and _same_images(mine, pair)]
    rivals = {run.method: (run, gallery) for run, gallery in others}
    both = [mine, *[rivals[method] for method in ("ie", "single") if method in rivals][:1]]
    wrong, *rival = (gallery.predictions.wrong for _, gallery in both)
    kinds = {"wrong": wrong}
    if rival:
        kinds = {"fixed": rival[0] & ~wrong, "broken": wrong & ~rival[0], "both": wrong & rival[0]}
    cards = _cards(both, kinds)
    counts = {kind: int(where.sum()) for kind, where in kinds.items()}
    counts["disputed"] = sum(card.kind == "disputed" for card in cards)
    titles = [run.title for run, _ in both]
    intro = f"Predictions of {' and '.join(titles)} for {len(wrong):,} test images, seed {mine[0].seed}. "
    if rival:
        intro += f"{titles[0]} fixes {counts['fixed']} errors of {titles[1]} and adds {counts['broken']}. "
    intro += (
        f"At most {MOST} of a kind are shown; disputed: the members contradict each other most confidently. "
        "◂ marks the most confident member."
    )
    named = {kind: (KINDS[kind].format(mine=titles[0]), count) for kind, count in counts.items() if count}
    return Examples(intro, named, cards)


def _same_images(*pairs: tuple[Run, Gallery]) -> bool:
    one, other = (gallery.predictions.targets for _, gallery in pairs)
    known = {run.record.checksums.get("test") for run, _ in pairs if run.record}
    return np.array_equal(one, other) and len(known) == 1


def _cards(shown: Sequence[tuple[Run, Gallery]], kinds: Mapping[str, NDArray[np.bool_]]) -> list[Card]:
    found: dict[str, dict[int, Card]] = {kind: {} for kind in (*kinds, "disputed")}
    for _, gallery in shown:
        for item in gallery.items:
            i = item.index
            kind = next((kind for kind, where in kinds.items() if where[i]), "disputed")
            if i not in found[kind] and len(found[kind]) < MOST:
                votes = {run.title: _votes(its.predictions, i, its.classes) for run, its in shown}
                label = gallery.classes[gallery.predictions.targets[i]]
                name = f"test image {i}, label {label}"
                found[kind][i] = Card(gallery.embed(item.image), label, kind, votes, name)
    return [card for cards in found.values() for card in cards.values()]


def _votes(found: Predictions, i: int, names: Sequence[str]) -> list[Vote]:
    """The averaged prediction, then each member's if there are several."""
    labels, percent, chosen = found.classes[:, i], 100 * found.confidence[:, i], found.entropy[1:, i].argmin()
    votes = [
        Vote(names[label], round(float(percent[row])), bool(label == found.targets[i]), row == chosen + 1)
        for row, label in enumerate(labels)
    ]
    return votes if len(votes) > 2 else votes[:1]


class Shot(NamedTuple):
    """A segmented image with the masks of each method's members."""

    name: str
    group: str
    image: str
    truth: str
    masks: dict[str, Sequence[tuple[str, float, bool, bool]]]  # image, error, best, chosen


def scenes(runs: Sequence[Run]) -> list[Shot]:
    """Image, ground truth and members, for the images in the first run's gallery of a segmentation."""
    found: dict[int, Shot] = {}
    shown = [(run, run.gallery) for run in runs if run.gallery and run.gallery.dense]
    for run, gallery in shown:
        for item in gallery.items:
            assert isinstance(item, Scene)
            if gallery is shown[0][1]:
                pictures = gallery.embed(item.image), gallery.embed(item.truth)
                found[item.index] = Shot(f"test image {item.index}", item.group or "", *pictures, {})
            if item.index in found:
                best = min(mask.error for mask in item.members)
                found[item.index].masks[run.title] = [
                    (gallery.embed(mask.mask), mask.error, mask.error == best, m == item.chosen)
                    for m, mask in enumerate(item.members)
                ]
    return list(found.values())
