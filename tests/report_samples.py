"""Made-up records and run folders for the report's tests: the shape of real ones, without training."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from cmcl.data.registry import CHECKSUMS
from cmcl.reproduction import CELLS, find
from cmcl.reproduction.gallery import Predictions
from cmcl.reproduction.record import Record

BINS = 50


def made_record(name, seed=0, *, top1=10.0, oracle=4.0, picked=None, classes=10, recipe=None, **changes):
    """A record of a recipe, all members alike."""
    recipe = recipe or find(name)
    m, dense = recipe.members, recipe.network == "fcn"
    data = CHECKSUMS.get(recipe.data, {"train": "a" * 64, "test": "b" * 64})
    shy = recipe.method == "cmcl"
    low, high = [90, 10] + [0] * (BINS - 2), [0] * (BINS - 2) + [10, 90]
    entropy = {"bins": BINS, "largest": math.log(classes), "averaged": low}
    if dense:
        entropy["test"] = [low] * m
    else:
        entropy |= {"specialised": [low] * m, "other": [high if shy else low] * m}
        entropy |= {"ood": [high if shy else low] * m, "averaged_ood": high if shy else low}
    known = [[95.0 if recipe.method == "ie" or c % m == i else 5.0 for c in range(classes)] for i in range(m)]
    fields = dict(
        name=name,
        recipe=json.loads(json.dumps(recipe.to_json())),
        recipe_hash=recipe.hash,
        seed=seed,
        full_length=True,
        full_test=True,
        test_examples=10_000,
        checksums=data,
        errors={
            mode: {"top1": top1, "picked": top1 if picked is None else picked, "oracle": oracle}
            for mode in ("expected", "sampled")
        },
        members=[top1 + 4.0] * m,
        classwise=known,
        calibration={
            "ece": 2.5,
            "risk_coverage": [top1 * (i + 1) / 100 for i in range(100)],
            "reliability": {
                "count": [0, 5, 95],
                "confidence": [None, 50.0, 95.0],
                "accuracy": [None, 40.0, 96.0],
            },
        },
        entropy=entropy,
        ood=None if dense else "svhn",
        steps=100,
        seconds=150.0,
        device="a device",
        precision="float32",
        versions={"cmcl": "0", "torch": "0"},
        commit="c" * 40,
    )
    return Record(**(fields | changes))


def changed(value, **changes):
    """A record or a dataclass with other values, validated again."""
    if isinstance(value, Record):
        return Record.parse(value.model_dump() | changes)
    return replace(value, **changes)


def whole_paper(seeds=2, spread=0.02):
    """A record for every cell and seed, near what the paper printed."""
    draw = random.Random(0)
    records = {}
    for cell in CELLS:
        for seed in range(seeds):
            printed = {} if cell.single else dict(cell.paper or {"top1": 10.0, "oracle": 5.0})
            values = {key: value * draw.uniform(1 - spread, 1 + spread) for key, value in printed.items()}
            if cell.name not in {r.name for r in records.values() if r.seed == seed} and not cell.single:
                classes = 2 if cell.recipe.data == "icoseg" else 10
                records[cell.name, seed] = made_record(cell.name, seed, classes=classes, **values)
    return list(records.values())


def save_results(folder, records):
    for record in records:
        record.save(Path(folder) / "records" / record.file_name)
    return Path(folder)


def save_run(folder, record, *, epochs=4, classes=None):
    """A run folder with record, telemetry and pictures."""
    folder = Path(folder)
    record.save(folder / "record.json")
    (folder / "recipe.json").write_text(json.dumps(record.recipe))
    rows = [telemetry_row(record, epoch) for epoch in range(1, epochs + 1)]
    (folder / "telemetry.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    save_gallery(folder / "gallery", record, classes)
    return folder


def telemetry_row(record, epoch):
    row = {"epoch": epoch, "step": 10 * epoch, "seed": record.seed, "loss": 2 / epoch, "lr": 0.1}
    row |= {"specialist_entropy": 1 / epoch, "nonspecialist_entropy": 2 - 1 / epoch}
    return row | {"top1": 50 / epoch, "oracle": 20 / epoch, "member": 60 / epoch}


def save_gallery(folder, record, classes=None):
    """Of four test images IE is wrong on 0 and 2, CMCL on 1 and 2."""
    folder.mkdir(parents=True)
    m, dense = record.recipe["members"], "test" in record.entropy
    classes = classes or [f"class {i}" for i in range(2 if dense else 10)]
    for name in ("1-truth", *map(str, range(4)), *(f"1-member{i}" for i in range(m))):
        Image.new("L", (8, 8), 40).save(folder / f"{name}.png")
    if dense:
        members = [{"mask": f"1-member{i}.png", "error": 2.0 + i, "entropy": 0.1} for i in range(m)]
        items = [{"index": 1, "image": "1.png", "chosen": 0, "truth": "1-truth.png", "members": members}]
    else:
        items = [{"index": i, "image": f"{i}.png", "target": i} for i in range(4)]
        wrong = [1, 2] if record.recipe["method"] == "cmcl" else [0, 2]
        predicted = np.tile(np.arange(4, dtype=np.uint32), (m + 1, 1))
        predicted[0, wrong] = 9
        confidence = np.full((m + 1, 4), 0.75, np.float16)
        found = Predictions(np.arange(4, dtype=np.uint32), predicted, confidence, 1 - confidence)
        np.savez(folder / "predictions.npz", **found._asdict())
    task = "segmentation" if dense else "classification"
    content = {"format": 2, "task": task, "classes": classes, "items": items}
    (folder / "gallery.json").write_text(json.dumps(content))
