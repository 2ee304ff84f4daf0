"""Galleries as the page shows them: pictures inside the page, answers in words."""

import base64
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .gather import Run


@dataclass(frozen=True)
class Picture:
    """An image or a mask with what is said about it."""

    source: str  # a data: address
    text: str  # for those who cannot see it
    title: str = ""
    note: str = ""
    chosen: bool = False


@dataclass(frozen=True)
class Answer:
    """What a member, or the ensemble, says of an image."""

    who: str
    answer: str
    confidence: float  # percent
    entropy: float | None
    right: bool
    chosen: bool = False


@dataclass(frozen=True)
class Card:
    """An image with everybody's answer."""

    picture: Picture
    truth: str
    answers: list[Answer]


@dataclass(frozen=True)
class Gallery:
    """What a run's gallery shows: cards (classification) or rows of pictures (segmentation)."""

    id: str
    title: str
    cards: list[Card]
    scenes: list[list[Picture]]


def gallery(run: Run, id: str) -> Gallery:
    """The pictures of a run that has some."""
    content: dict[str, Any] = run.gallery or {}
    dense = content["task"] == "segmentation"
    cards = [] if dense else [_card(item, content) for item in content["items"]]
    scenes = [_scene(item, content["folder"]) for item in content["items"]] if dense else []
    return Gallery(id, run.label, cards, scenes)


def _card(item: dict[str, Any], content: dict[str, Any]) -> Card:
    classes, target = content["classes"], item["target"]
    answers = [
        Answer(
            str(m),
            classes[member["answer"]],
            100 * member["confidence"],
            member["entropy"],
            member["answer"] == target,
            m == item["chosen"],
        )
        for m, member in enumerate(item["members"])
    ]
    averaged = item["ensemble"]
    right = averaged["answer"] == target
    answers.append(Answer("all", classes[averaged["answer"]], 100 * averaged["confidence"], None, right))
    text = f"test image {item['index']}, in truth {classes[target]}"
    return Card(Picture(_embedded(content["folder"] / item["image"]), text), classes[target], answers)


def _scene(item: dict[str, Any], folder: Path) -> list[Picture]:
    name = f"test image {item['index']}" + (f" ({item['group']})" if item.get("group") else "")
    best = min(member["error"] for member in item["members"])
    row = [
        Picture(_embedded(folder / item["image"]), name, "image", str(item.get("group", ""))),
        Picture(_embedded(folder / item["truth"]), f"{name}: ground truth", "truth"),
    ]
    for m, member in enumerate(item["members"]):
        words = [f"{member['error']:.1f} %"] + ["best"] * (member["error"] == best)
        chosen = m == item["chosen"]
        row.append(
            Picture(
                _embedded(folder / member["mask"]),
                f"{name}: prediction of member {m}, {member['error']:.1f} % wrong",
                f"member {m}",
                ", ".join(words + ["chosen"] * chosen),
                chosen,
            )
        )
    return row


def _embedded(path: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()
