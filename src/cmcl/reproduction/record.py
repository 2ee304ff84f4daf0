"""`Record`: one trained ensemble, evaluated. One JSON file each, so that results merge by copying files."""

import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any, Final, Literal, NotRequired, Self

from pydantic import ConfigDict, Field, field_validator, model_validator
from typing_extensions import TypedDict

from .._files import read_json, replacing
from .._schema import Schema
from ..training.config import Recipe

FORMAT: Final = 2  # raise it when an earlier version of cmcl could misread what is written
SCALED = ("temperature", "scaled_ece", "scaled_reliability")  # what a temperature adds to `calibration`
EVALUATED = {"errors", "members", "classwise", "calibration", "entropy", "ood", "validation", "format"}

Percent = Annotated[float, Field(ge=0, le=100)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Histogram = list[Count]


class Errors(TypedDict):
    """Error rates in percent."""

    top1: Percent  # of the averaged prediction
    picked: Percent  # of the most confident member's: the paper's top-1 error for segmentation
    oracle: Percent  # of the best member for each example


class Modes(TypedDict):
    """Errors by mode of feature sharing at test time; both are the same without sharing."""

    expected: Errors
    sampled: Errors


class Reliability(TypedDict):
    """Bins of equal width over the confidence of the averaged prediction; None where a bin is empty."""

    count: Histogram  # predictions in each bin
    confidence: list[Percent | None]  # their mean confidence, in percent
    accuracy: list[Percent | None]  # percentage of them that are right


class Calibration(TypedDict):
    """Of the averaged prediction, not scaled by a temperature unless said. ECE is in percent."""

    ece: Percent  # expected calibration error
    temperature: NotRequired[Annotated[float, Field(gt=0)]]  # of the ensemble, if it has one
    scaled_ece: NotRequired[Percent]  # ECE after scaling by the temperature
    scaled_reliability: NotRequired[Reliability]  # the bins behind the scaled ECE
    # without a temperature: ECE after scaling each half of the examples by the temperature of the other half;
    # of a part of them if there are very many
    cross_fitted_ece: NotRequired[Percent]
    nll: NotRequired[float]  # negative log-likelihood, in nats
    brier: NotRequired[float]  # Brier score, 0 to 2
    aurc: NotRequired[float]  # area under the risk-coverage curve, 0 to 1
    auroc: NotRequired[float]  # of OOD detection, 0 to 1; needs OOD data
    fpr95: NotRequired[float]  # false positives at 95 % true positives, 0 to 1; needs OOD data
    reliability: Reliability  # the bins behind the ECE
    risk_coverage: Annotated[list[Percent], Field(min_length=1)]  # error of the 1 %, 2 %, ... most confident


class Entropy(TypedDict):
    """Histograms from 0 to `largest`: of each member, and of the averaged prediction."""

    bins: Count  # of each histogram
    largest: Annotated[float, Field(gt=0)]  # entropy of the uniform prediction, in nats
    specialised: NotRequired[list[Histogram]]  # on the classes that a member specialises in
    other: NotRequired[list[Histogram]]  # on the other classes
    test: NotRequired[list[Histogram]]  # of segmentation, on all images
    averaged: Histogram  # of the averaged prediction, on all test examples
    ood: NotRequired[list[Histogram]]  # of each member, on OOD data
    averaged_ood: NotRequired[Histogram]  # of the averaged prediction, on OOD data


# a keyword in its class syntax
Network = TypedDict("Network", {"class": str, "parameters": Count, "digest": str})


class Record(Schema):
    """The result of a run, and everything that determined it."""

    model_config = ConfigDict(strict=True)

    name: str  # of the recipe
    recipe: dict[str, Any]  # all fields of `Recipe`
    recipe_hash: str  # checksum of these fields
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)]  # of weights, data order, masks and labels
    full_length: bool  # False: shortened, to try something out
    full_test: bool  # False: evaluated on part of the test set
    test_examples: Annotated[int, Field(gt=0, lt=2**63)]  # that were evaluated
    checksums: dict[str, str]  # of the data, by split: "train", "test"
    errors: Modes  # "expected" and "sampled", by mode of feature sharing at test time
    members: Annotated[list[Percent], Field(min_length=1)]  # error of each member alone
    classwise: list[list[Percent | None]]  # accuracy (M, C)
    calibration: Calibration  # of the averaged prediction
    entropy: Entropy  # histograms of the predictions' entropy
    network: Network | None = None  # of a network that no recipe names
    task: str | None = None  # the name of a custom task loss
    trained_on: str | None = None  # custom data: how many examples, with which labels
    weights: str | None = None  # checksum of the trained weights; early records lack it
    ood: str | None = None  # the dataset behind `entropy["ood"]` and AUROC
    validation: Errors | None = None  # on the held-out part of the training set
    overlap: Count | None = None  # K, given or chosen; early records lack it
    steps: Count  # of training
    seconds: Annotated[float, Field(ge=0)]  # of training, over all the times the run was resumed
    device: str  # name of the GPU, or of the CPU with its threads
    mesh: str | None = None  # of several processes: "members=2,data=2"
    precision: str  # "bf16" or "float32"
    versions: dict[str, str | None]  # of cmcl, Python, torch and CUDA
    commit: str | None  # of cmcl; ends with "-dirty" if files were changed
    resumed_with: list[dict[str, Any]] = Field(
        default_factory=list
    )  # environments of all parts of the run, if they differ
    format: Literal[2] = FORMAT  # version of this schema

    @field_validator("format", mode="before")
    @classmethod
    def _known_format(cls, value: Any) -> Any:
        if value != FORMAT:
            hint = "Upgrade cmcl" if isinstance(value, int) and value > FORMAT else "Run it again"
            raise ValueError(f"format must be {FORMAT}. Got {str(value)[:20]}. {hint}.")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        members = Recipe.from_json(self.recipe).members
        if {len(self.members), len(self.classwise)} != {members}:
            raise ValueError(f"members and classwise must have {members} entries, as many as the recipe.")
        if len({len(row) for row in self.classwise}) > 1 or not any(x is not None for x in self.classwise[0]):
            raise ValueError("classwise must have rows of one length, with accuracies.")
        for key in {"reliability", "scaled_reliability"} & self.calibration.keys():
            columns: Any = self.calibration[key]  # type: ignore[literal-required]
            if len({len(column) for column in columns.values()}) > 1:
                raise ValueError(f"{key} must have columns of one length.")
        if {len(counts) for counts in self._histograms()} != {self.entropy["bins"]}:
            raise ValueError(f"entropy must have histograms of {self.entropy['bins']} bins.")
        if missing := {"data", "network", "method", "sharing"} - set(self.recipe):
            raise ValueError(f"recipe must have a field {min(missing)!r}. Got none.")
        return self

    def _histograms(self) -> Iterator[Histogram]:
        for key, value in self.entropy.items():
            if isinstance(value, list):  # not bins, nor largest
                yield from [value] if key.startswith("averaged") else value

    @property
    def complete(self) -> bool:
        """Whether training and evaluation have their full length."""
        return self.full_length and self.full_test

    @property
    def dense(self) -> bool:
        """Whether the ensemble predicts a class per pixel."""
        return "test" in self.entropy

    @property
    def scores(self) -> dict[str, float]:
        """What tables show, in percent: top1, picked and oracle error, the mean of the members', and ECE.

        `scaled_ece` is the ECE after temperature scaling, if the ensemble has a temperature.
        """
        found: Any = self.errors["expected"]
        calibration = {key: value for key, value in self.calibration.items() if key in ("ece", "scaled_ece")}
        return {**found, "member": round(fmean(self.members), 6), **calibration}

    @property
    def identity(self) -> str:
        """The same for all records of one trained ensemble on the same test data."""
        # Equal weights may belong to networks that predict differently, as with other dropout at test time.
        known: Any = [self.weights, self.recipe_hash, self.network, self.task]
        if self.weights is None:
            known = self.model_dump(exclude=EVALUATED)
        return json.dumps([known, self.checksums, self.test_examples, self.full_test], sort_keys=True)

    @property
    def file_name(self) -> str:
        """Readable, and unique to recipe and seed."""
        return file_name(self.name, self.recipe_hash, self.seed)

    def save(self, path: Path) -> None:
        """Write one JSON file with a line for each field; do nothing if the same record is there."""
        if read(path) == self:
            return
        lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in self.model_dump().items()]
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as part:
            part.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "Record":
        """Read a file that `save` wrote. Everything wrong with it raises `ValueError`."""
        record: Record = cls.parse(read_json(path), source=path)
        return record


def read(path: Path) -> Record | None:
    """The record in a file; None where there is no whole one."""
    try:
        return Record.load(path)
    except (ValueError, OSError):
        return None


def file_name(name: str, recipe_hash: str, seed: int) -> str:
    """The name of a record's file."""
    return f"{name}--{recipe_hash}--seed{seed}.json"


def load_records(results: str | Path) -> list[Record]:
    """All records in `results`/records, sorted by name. Warns about those that cannot be read."""
    found = []
    for path in sorted((Path(results) / "records").glob("*.json")):
        try:
            found.append(Record.load(path))
        except (ValueError, OSError) as error:
            warnings.warn(f"skipped: {error}", stacklevel=2)
    return found


def distinct(records: Iterable[Record]) -> list[Record]:
    """The records without copies of the same run's."""
    return list({record.identity: record for record in records}.values())


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Mean, sample standard deviation (None for one value) and number of values."""
    std = round(stdev(values), 6) if len(values) > 1 else None
    return {"mean": round(fmean(values), 6), "std": std, "n": len(values)}


def spread_text(found: Mapping[str, Any]) -> str:
    """Mean, and the standard deviation if there is one: "5.20 ± 0.11"."""
    mean = f"{found['mean']:.2f}"
    return mean if found["std"] is None else f"{mean} ± {found['std']:.2f}"
