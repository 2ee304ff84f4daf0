"""What a run is expected to take: a rough table, corrected by what earlier runs on the same device took."""

import json
from collections.abc import Iterable
from pathlib import Path
from statistics import median_low

from safetensors import SafetensorError, safe_open

from ..data.registry import DATASETS
from ..training.config import Recipe
from .environment import stretches
from .record import Record

# Milliseconds of one step of one member in an ensemble of five, on an H200.
ROUGH = {"cnn": 0.35, "resnet20": 0.8, "vggnet17": 1.2, "googlenet18": 2.0, "fcn": 1.0}
SMALL = {"digits": 0.02, "shapes": 0.05}  # sets whose images and networks are small
SHARING = {"cnn": 1.7}  # masks on a large first feature map; 1.2 for the other networks
ADVERSARIAL = 2.5  # a second pass, and the gradient of the inputs
CPU = 150.0  # so many times slower
START = 60.0  # seconds to load, compile and measure on a GPU; a tenth on a CPU, which compiles nothing
EXAMPLES = {name: info.sizes["train"] for name, info in DATASETS.items() if info.sizes}


def expected_seconds(
    recipe: Recipe, seeds: int, records: Iterable[Record], device: str, *, cpu: bool
) -> float:
    """The expected wall time of so many seeds trained together, from the first step to the record."""
    ratios = [
        (_likeness(record, recipe), record.seconds / _rough(*_ran(record), cpu))
        for record in records
        if record.device == device and record.full_length
    ]
    closest = max((likeness for likeness, _ in ratios), default=None)
    # of two the lower: the other may have had company on the device
    correction = median_low([ratio for likeness, ratio in ratios if likeness == closest] or [1.0])
    return _rough(recipe, seeds, cpu) * correction


def at_its_own_speed(folder: Path, steps: int, device: str, *, cpu: bool) -> float | None:
    """What an interrupted run still takes, from the time it took so far.

    None where that tells little: on another device, or before it ran for twice as long as a start takes.
    """
    kept = sorted((folder / "checkpoints").glob("step-*.safetensors"))
    try:
        with safe_open(kept[-1], framework="pt") as file:
            spent = float(json.loads(file.metadata()["state"])["seconds"])
    except (IndexError, OSError, SafetensorError, ValueError, TypeError, KeyError):
        return None  # none, or a damaged one
    start, step = _start(cpu), int(kept[-1].name.split("-")[1])
    elsewhere = any(one["device"] != device for one in stretches(folder))
    if elsewhere or not 0 < step < steps or spent < 2 * start:
        return None
    return (spent - start) / step * (steps - step) + start


def _start(cpu: bool) -> float:
    return START / 10 if cpu else START


def _rough(recipe: Recipe, seeds: int, cpu: bool) -> float:
    milliseconds = SMALL.get(recipe.data or "", ROUGH.get(recipe.network or "", 1.0))
    if recipe.sharing:
        milliseconds *= SHARING.get(recipe.network or "", 1.2)
    if recipe.adversarial:
        milliseconds *= ADVERSARIAL
    steps = recipe.total_steps(EXAMPLES.get(recipe.data or "", 1000))
    seconds = steps * recipe.members * seeds * milliseconds / 1000
    return (seconds * CPU if cpu else seconds) + _start(cpu)


def _ran(record: Record) -> tuple[Recipe, int]:
    return Recipe.from_json(record.recipe), 1


def _likeness(record: Record, recipe: Recipe) -> tuple[bool, ...]:
    """Compares as tuples do: the same recipe, else the same network and data, else the same network."""
    other = record.recipe
    same = [other[key] == getattr(recipe, key) for key in ("network", "data", "sharing")]
    return record.recipe_hash == recipe.hash, *same
