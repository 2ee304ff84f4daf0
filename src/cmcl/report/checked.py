"""What comes from a file is looked at once, here, so that all that follows can trust it."""

import math
from pathlib import Path
from typing import Any

PNG = b"\x89PNG\r\n\x1a\n"
NUMBERS = (  # of a row of telemetry, that are drawn
    *("loss", "task", "kl", "winners_entropy", "losers_entropy", "top1", "oracle", "member"),
    *("images_per_second", "gradient_norm", "lr", "step"),
)


def check_row(row: Any) -> None:
    """Raise unless a row of telemetry can be drawn."""
    number(row["epoch"])
    _require(_whole(row.get("seed", 0)), "a seed", row.get("seed"))
    for key in NUMBERS:
        number(row.get(key), empty=True)
    numbers(row.get("win_rates", []))
    _require(all(grid(row.get("win_rates_by_class", []))), "rates of some classes", "none")
    _require(all(map(_whole, row.get("dead_members", []))), "members", row.get("dead_members"))


def check_gallery(content: Any, folder: Path) -> None:
    """Raise unless all pictures are there and every answer is a class."""
    dense = content["task"] == "segmentation"
    _require(dense or content["task"] == "classification", "a known task", content["task"])
    classes = content["classes"]
    _require(isinstance(classes, list), "a list of classes", classes)
    _require(isinstance(content["items"], list), "a list of pictures", content["items"])
    _require(all(isinstance(name, str) for name in classes), "names of classes", classes)
    for item in content["items"]:
        _picture(folder, item["image"])
        _require(_whole(item["index"]), "the image's number", item["index"])
        if dense:
            _picture(folder, item["truth"])
        else:
            for answer in (item["target"], item["ensemble"]["answer"]):
                classes[answer]
            number(item["ensemble"]["confidence"])
        for member in item["members"]:
            number(member["entropy"])
            number(member["error" if dense else "confidence"])
            if dense:
                _picture(folder, member["mask"])
            else:
                classes[member["answer"]]
        item["members"][item["chosen"]]


def number(value: Any, *, empty: bool = False) -> float | None:
    """A finite number; None too, if it may be `empty`."""
    if value is None and empty:
        return None
    right = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    _require(right, "a number", value)
    return float(value)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def numbers(values: Any, *, empty: bool = False) -> list[float | None]:
    """A list of them."""
    _require(isinstance(values, list), "a list of numbers", values)
    return [number(value, empty=empty) for value in values]


def grid(rows: Any, *, empty: bool = False) -> list[list[float | None]]:
    """A list of equally long lists of them."""
    _require(isinstance(rows, list), "lists of numbers", rows)
    found = [numbers(row, empty=empty) for row in rows]
    _require(len({len(row) for row in found}) <= 1, "rows of one length", [len(row) for row in found])
    return found


def _picture(folder: Path, name: Any) -> None:
    """A PNG file in this very folder: the page shows no others."""
    _require(isinstance(name, str) and Path(name).name == name, "a file's name", name)
    with (folder / name).open("rb") as file:
        _require(file.read(len(PNG)) == PNG, "a PNG picture", name)


def _require(right: bool, what: str, came: Any) -> None:
    if not right:
        raise ValueError(f"expected {what}, got {str(came)[:60]!r}")
