"""Rejecting and ranking with the ensembles of zoo/: CIFAR-10 is known, SVHN was never seen.

    python benchmarks/rejecting.py --root DATA --cache DIR

Writes results/rejecting.txt, and results/rejecting.json, from which docs/make.py draws. The cache keeps the
members' probabilities, which take minutes. Of the test images, the even ones calibrate, the odd ones test.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import cmcl
from cmcl.calibration import (
    ABSTAIN,
    SCORES,
    apply_temperature,
    decide,
    fit_temperature,
    fit_threshold,
    uncertainty,
)
from cmcl.reproduction.environment import commit, device_name, versions

ROOT = Path(__file__).parents[1]
METHODS = {"ie": "cifar10-resnet20-ie", "cmcl": "cifar10-resnet20-cmcl"}
RISKS = (0.005, 0.01, 0.02, 0.05)
BINS = 50
COMMAND = "$ python benchmarks/rejecting.py --root DATA --cache DIR"


def probabilities(method: str, data: str, limit: int, root: Path, cache: Path) -> Tensor:
    """The members' probabilities (M, N, C) for the first test images of a set, predicted once."""
    path = cache / f"{METHODS[method]}-{data}-{limit}.safetensors"
    if not path.exists():
        ensemble = cmcl.load(ROOT / "zoo" / METHODS[method], root=root)
        images = cmcl.data.load(data, split="test", root=root)[:limit].images
        cache.mkdir(parents=True, exist_ok=True)
        save_file({"probs": ensemble.predict(images, batch_size=250).member_probs}, path)
    return load_file(path)["probs"]


def measure(known: Tensor, targets: Tensor, unseen: Tensor) -> dict[str, Any]:
    """Everything about one ensemble, as JSON values."""
    right = known.mean(0).argmax(1) == targets
    curves, ranking = {}, {}
    for score in SCORES:
        inside, outside = uncertainty(known, score), uncertainty(unseen, score)
        ranking[score] = {
            "auroc": round(cmcl.metrics.auroc(inside, outside), 4),
            "fpr95": round(cmcl.metrics.fpr95(inside, outside), 4),
            "aurc": round(cmcl.metrics.aurc(-inside, right), 5),
            "known": histogram(inside),
            "unseen": histogram(outside),
        }
        risk = cmcl.metrics.risk_coverage(-inside, right)[1]
        points = (torch.arange(1, 101) * len(risk) / 100).ceil().long() - 1
        curves[score] = [round(100 * x, 4) for x in risk[points].tolist()]
    special = cmcl.metrics.specialised_classes(known, targets)[:, targets]  # (M, N)
    entropy, outside = cmcl.metrics.entropy(known), cmcl.metrics.entropy(unseen)
    return {
        "top1": round(100 * cmcl.metrics.top1_error(known, targets), 4),
        "oracle": round(100 * cmcl.metrics.oracle_error(known, targets), 4),
        "ranking": ranking,
        "risk_coverage": curves,
        "tempered": temper(known, targets),
        "rejecting": [reject(known, targets, risk) for risk in RISKS],
        "members": [
            {
                "specialised": histogram(own[mine]),
                "other": histogram(own[~mine]),
                "unseen": histogram(other),
            }
            for own, mine, other in zip(entropy, special, outside, strict=True)
        ],
    }


def reject(known: Tensor, targets: Tensor, risk: float) -> dict[str, Any]:
    """A threshold from the even images, and what it does on the odd ones."""
    threshold = fit_threshold(known[:, ::2], targets[::2], risk=risk)
    answers, truth = decide(known[:, 1::2], threshold), targets[1::2]
    answered = answers != ABSTAIN
    wrong = int((answers[answered] != truth[answered]).sum())
    return threshold.to_json() | {
        "coverage": round(threshold.coverage, 4),
        "tested": len(truth),
        "tested_answered": int(answered.sum()),
        "tested_wrong": wrong,
    }


def temper(known: Tensor, targets: Tensor) -> dict[str, Any]:
    """A temperature from the even images, and what it does on the odd ones."""
    t = fit_temperature(known[:, ::2], targets[::2])
    probs, truth = known[:, 1::2], targets[1::2]
    found: dict[str, Any] = {"temperature": round(t, 4)}
    for name, answer in (("before", probs), ("after", apply_temperature(probs, t)[None])):
        found[name] = {
            "ece": round(100 * cmcl.metrics.ece(answer, truth), 4),
            "nll": round(cmcl.metrics.nll(answer, truth), 4),
            "brier": round(cmcl.metrics.brier(answer, truth), 4),
        }
    return found


def histogram(values: Tensor) -> list[int]:
    """Of a score between 0 and log C."""
    top = torch.tensor(10.0).log().item()
    return [int(x) for x in torch.histc(values.clamp(0, top), BINS, 0, top)]


def write(found: dict[str, Any]) -> str:
    """The same numbers for people."""
    lines = [
        COMMAND,
        f"torch {found['versions']['torch']}, {found['device']}, commit {found['commit']}",
        "Ensembles of zoo/: 5 ResNet-20 on CIFAR-10, one seed.",
        f"Known: {found['known']:,} test images of CIFAR-10; even ones calibrate, odd ones test. "
        f"Never seen: the first {found['unseen']:,} of SVHN's.",
        "",
        "Abstention: a risk is asked for (95 % confidence, score 'confidence'); the share answered, and",
        "the error among the answered.",
        "",
        "| method | risk asked | answered, calibration | bound | answered, test | wrong of them | error |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for method in METHODS:
        for row in found[method]["rejecting"]:
            answered, wrong = row["tested_answered"], row["tested_wrong"]
            error = f"{100 * wrong / answered:.2f} %" if answered else "-"
            lines.append(
                f"| {method.upper()} | {100 * row['risk']:g} % | {100 * row['coverage']:.1f} % | "
                f"{100 * row['bound']:.2f} % | {100 * answered / row['tested']:.1f} % | {wrong} | {error} |"
            )
    lines += [
        "",
        "Scores: telling SVHN from CIFAR-10 (AUROC, 1 is perfect; FPR where 95 % of SVHN is found), and",
        "wrong answers from right ones (AURC, the mean error over all coverages; lower is better).",
        "",
        "| method | score | AUROC | FPR95 | AURC |",
        "|---|---|--:|--:|--:|",
    ]
    for method in METHODS:
        for score, row in found[method]["ranking"].items():
            numbers = f"{row['auroc']:.3f} | {100 * row['fpr95']:.1f} % | {100 * row['aurc']:.2f} %"
            lines.append(f"| {method.upper()} | {score} | {numbers} |")
    lines += [
        "",
        "Calibration: one temperature for the averaged answer, from the even images; tried on the odd ones.",
        "",
        "| method | temperature | ECE | after | NLL | after | Brier | after |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for method in METHODS:
        row = found[method]["tempered"]
        before, after = row["before"], row["after"]
        lines.append(
            f"| {method.upper()} | {row['temperature']:.2f} | {before['ece']:.2f} % | {after['ece']:.2f} % | "
            f"{before['nll']:.3f} | {after['nll']:.3f} | {before['brier']:.3f} | {after['brier']:.3f} |"
        )
    errors = [f"{m.upper()} {found[m]['top1']:.2f}, oracle {found[m]['oracle']:.2f}" for m in METHODS]
    lines += ["", f"Errors on all {found['known']:,} images, answering all: {'; '.join(errors)} %."]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Predict, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, required=True, help="holds cifar-10-batches-py/ and svhn/")
    parser.add_argument("--cache", type=Path, required=True, help="keeps the probabilities")
    parser.add_argument("--known", type=int, default=10_000, help="CIFAR-10 test images")
    parser.add_argument("--unseen", type=int, default=5_000, help="SVHN test images")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    targets = cmcl.data.load("cifar10", split="test", root=asked.root)[: asked.known].targets
    found: dict[str, Any] = {
        "command": COMMAND,
        "known": asked.known,
        "unseen": asked.unseen,
        "versions": versions(),
        "device": device_name(torch.device("cpu")),
        "commit": commit(),
    }
    for method in METHODS:
        known = probabilities(method, "cifar10", asked.known, asked.root, asked.cache)
        unseen = probabilities(method, "svhn", asked.unseen, asked.root, asked.cache)
        found[method] = measure(known, targets, unseen)
    (ROOT / "results" / "rejecting.json").write_text(json.dumps(found) + "\n")
    (ROOT / "results" / "rejecting.txt").write_text(write(found))
    print(write(found), end="")


if __name__ == "__main__":
    main()
