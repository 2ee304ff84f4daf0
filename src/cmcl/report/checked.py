"""What comes from a file is looked at once, here, so that all that follows can trust it."""

import math
from pathlib import Path
from typing import Any

from ..experiments.records import Record

PNG = b"\x89PNG\r\n\x1a\n"
NUMBERS = (  # of a row of telemetry, that are drawn
    *("loss", "task", "kl", "winners_entropy", "losers_entropy", "top1", "oracle", "member"),
    *("images_per_second", "gradient_norm", "lr", "step"),
)


def check_record(record: Record) -> None:
    """Raise unless every number that the report uses is one."""
    for text in (record.name, record.recipe_hash, record.device, record.precision):
        _require(isinstance(text, str), "a text", text)
    for count in (record.seed, record.steps, record.test_examples):
        _require(isinstance(count, int), "a whole number", count)
    _require(record.recipe["method"] in ("ie", "mcl", "cmcl"), "a method", record.recipe["method"])
    number(record.seconds)
    for mode in record.errors.values():
        for value in mode.values():
            number(value)
    number(record.errors["expected"]["top1"])
    number(record.errors["expected"]["oracle"])
    m = len(numbers(record.members))
    _require(m > 0 and len(record.classwise) == m, f"one row a member, {m}", len(record.classwise))
    grid(record.classwise, empty=True)
    number(record.calibration["ece"])
    numbers(record.calibration["risk_coverage"])
    reliability = record.calibration["reliability"]
    counts = numbers(reliability["count"])
    for key in ("confidence", "accuracy"):
        _require(len(numbers(reliability[key], empty=True)) == len(counts), "as many bins", key)
    number(record.entropy["largest"])
    for key in ("specialised", "other", "test", "outside"):
        grid(record.entropy.get(key, []))
    _require(len(record.together) > 0, "at least one seed", record.together)
    dict(record.versions)


def check_row(row: Any) -> None:
    """Raise unless a row of telemetry can be drawn."""
    number(row["epoch"])
    _require(isinstance(row.get("seed", 0), int), "a seed", row.get("seed"))
    for key in NUMBERS:
        number(row.get(key), empty=True)
    numbers(row.get("win_rates", []))
    grid(row.get("win_rates_by_class", []))


def check_gallery(content: Any, folder: Path) -> None:
    """Raise unless all pictures are there and every answer is a class."""
    dense = content["task"] == "segmentation"
    _require(dense or content["task"] == "classification", "a known task", content["task"])
    classes = content["classes"]
    _require(all(isinstance(name, str) for name in classes), "names of classes", classes)
    for item in content["items"]:
        _picture(folder, item["image"])
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
