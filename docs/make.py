"""The pictures and tables of these pages, made from files in results/ and zoo/: python docs/make.py

A picture carries a digest of what it was drawn from, and tables stand between two comments; a test compares.
"""

import json
import re
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any

import matplotlib as mpl
from drawings import DRAWN, RECORDS, ROOT, STYLE, digest, segmentation_errors

from cmcl.report.documents import fill
from cmcl.reproduction import RECIPES, find
from cmcl.reproduction.cells import select
from cmcl.reproduction.record import Record, load_records

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PICTURES = ROOT / "docs" / "pictures"
TRIED = ROOT / "results" / "tried"  # records that fill no cell
MASTERED = 90  # percent right, as in the paper's figure 2


def zoo() -> str:
    """The two ensembles of zoo/ side by side."""
    rows = ["| method | top-1 | oracle | members alone | ECE | NLL |", "|---|--:|--:|--:|--:|--:|"]
    for path, name in zip(RECORDS, ("independent ensemble", "CMCL, K = 4"), strict=True):
        record = json.loads(path.read_text())
        errors, calibration = record["errors"]["expected"], record["calibration"]
        numbers = (errors["top1"], errors["oracle"], fmean(record["members"]), calibration["ece"])
        cells = [f"{number:.2f} %" for number in numbers] + [f"{calibration['nll']:.3f}"]
        rows.append(f"| {' | '.join([name, *cells])} |")
    return "\n".join(rows)


def demo() -> str:
    """What the demo's settings give on the seeds that they were not chosen on."""
    lines = (ROOT / "results" / "demo-seeds.txt").read_text(encoding="utf-8").splitlines()
    rows = [re.split(r"\s{2,}", line) for line in lines if line.count("±") == 3]
    names = {"single": "one network", "ie": "independent ensemble", "mcl": "MCL", "cmcl": "**CMCL**"}
    seeds = next(line for line in lines if " seeds, " in line).split(",")[0]
    verdict = next(line for line in lines if line.startswith("CMCL's top-1"))
    table = [f"| {seeds} | top-1 error % | oracle error % |", "|---|--:|--:|"]
    table += [f"| {names[name]} | {top1} | {oracle} |" for name, top1, oracle, _ in rows]
    return "\n".join([*table, "", f"{verdict}."])


def icoseg() -> str:
    """Figures 4b and 4c as a table: most confident member, averaged prediction, oracle."""
    errors = [segmentation_errors(kind) for kind in ("picked", "top1", "oracle")]

    def cell(m: int, method: str) -> str:
        if (m, method) in errors[0]:
            return " / ".join(f"{kind[m, method]:.2f}" for kind in errors)
        return "as IE" if m == 1 else "not measured"

    rows = ["| members | IE | MCL | CMCL |", "|--:|--:|--:|--:|"]
    rows += [
        f"| {m} | {' | '.join(cell(m, method) for method in ('ie', 'mcl', 'cmcl'))} |" for m in range(1, 6)
    ]
    return "\n".join(rows)


def tried(pattern: str) -> list[dict[str, Any]]:
    """Records with held-out images, the best on those first."""
    records = [json.loads(path.read_text()) for path in sorted(TRIED.glob(pattern))]
    return sorted((r for r in records if r["validation"]), key=lambda r: r["validation"][_score(r["recipe"])])


def icoseg_search() -> str:
    """What the learning rates and beta were chosen by."""
    rows = ["| method | learning rate | beta | held-out top-1 % | test top-1 % |", "|---|--:|--:|--:|--:|"]
    for method in ("ie", "mcl", "cmcl"):
        for record in tried(f"icoseg-fcn-m5-{method}-*"):
            recipe, beta = record["recipe"], f"{record['recipe']['beta']:g}" if method == "cmcl" else "–"
            rows.append(f"| {method.upper()} | {recipe['lr']:g} | {beta} | {_top1(record)} |")
    return "\n".join(rows)


def small_cnn() -> str:
    """One small CNN in variants."""
    rows = [
        "| epochs | differs from the authors' program by | held-out top-1 % | test top-1 % |",
        "|--:|---|--:|--:|",
    ]
    records = tried("cifar10-cnn-ie-*")
    for record in sorted(records, key=lambda r: -r["recipe"]["steps"]):  # stable: the best first
        recipe = record["recipe"]
        changes = [f"`{name}={value}`" for name, value in recipe["network_options"].items()]
        changes += [f"`lr={recipe['lr']:g}`"] * (recipe["lr"] != 0.01)
        changes += [f"`weight_decay={recipe['weight_decay']:g}`"] * (recipe["weight_decay"] != 5e-4)
        changes += [f"`preprocess={recipe['preprocess']}`"] * (recipe["preprocess"] != "gcn_zca")
        epochs = recipe["steps"] * recipe["batch_size"] / (50_000 * (1 - recipe["validation"]))
        rows.append(f"| {epochs:.0f} | {', '.join(changes) or 'nothing'} | {_top1(record)} |")
    return "\n".join(rows)


TREATMENTS = {  # of dropout before max-pooling at test, as benchmarks/dropout_at_test.py calls them
    "shrunk": "halved (the program)",
    "expected": "mean over the masks",
    "drawn 8 times": "eight draws, averaged",
}


def at_test() -> str:
    """Table 1's ensembles under other treatments of dropout at test, beside the paper's numbers."""
    heads = ["top-1 / oracle %", "paper", *TREATMENTS.values()]
    heads += ["training top-1 %: halved", "mean"]
    rows = [heads, ["---"] + ["--:"] * (len(heads) - 1)]
    for cell in select(["table1"]):
        found = [_treated(f"{cell.name}--", treatment) for treatment in TREATMENTS]
        printed = f"{cell.paper['top1']:.2f} / {cell.paper['oracle']:.2f}" if cell.paper else "–"
        test = [f"{numbers[0]} / {numbers[1]}" for numbers in found]
        rows.append([f"`{cell.name}`", printed, *test, *(numbers[2] for numbers in found[:2])])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def held_out() -> str:
    """One network under the same treatments, on images that were held out of its training."""
    rows = ["| dropout before pooling, at test | held-out top-1 % | test top-1 % |", "|---|--:|--:|"]
    for treatment, title in TREATMENTS.items():
        test, _, other = _treated("cifar10-cnn-ie-members1", treatment)
        rows.append(f"| {title} | {other} | {test} |")
    return "\n".join(rows)


def long_run() -> str:
    """One network trained in full: where its dropout stands."""
    ie = seeds_of("cifar10-cnn-ie")[0].members
    (after,) = (Record.load(path) for path in TRIED.glob("cifar10-cnn-ie-dropbeforepoolfalse-members1--*"))
    rows = ["| one network, 200 epochs | test top-1 % |", "|---|--:|"]
    alone = f"{fmean(ie):.2f} ({min(ie):.2f} to {max(ie):.2f})"
    rows.append(f"| dropout before pooling, mean over the masks (IE's five members) | {alone} |")
    rows.append(f"| dropout after pooling | {fmean(after.members):.2f} |")
    return "\n".join(rows)


def trained_again() -> str:
    """The rows of Table 1 that were trained more than once, run by run."""
    rows = ["| top-1 / oracle % | paper | first run | another | |", "|---|--:|--:|--:|---|"]
    earlier = (ROOT / "results" / "dropout-factors-h200.txt").read_text()
    for cell in select(["table1"]):
        first, *others = (r.errors["expected"] for r in seeds_of(cell.name))
        other, which = (others or [None])[0], "another seed"
        if other is None and f"## {cell.name}--" in earlier:
            block = earlier[earlier.index(f"## {cell.name}--") :].partition("expected pooling ")[2]
            found = re.findall(r"(top1|oracle) +([\d.]+)", block.partition("\n")[0])[:2]
            other, which = {key: float(value) for key, value in found}, "the same seed, an earlier training"
        if other and cell.paper:
            runs = [f"{run['top1']:.2f} / {run['oracle']:.2f}" for run in (cell.paper, first, other)]
            rows.append(f"| `{cell.name}` | {' | '.join(runs)} | {which} |")
    return "\n".join(rows)


def seeds_of(name: str) -> list[Record]:
    """The records of a recipe, by seed."""
    found = [r for r in load_records(ROOT / "results") if r.recipe_hash == find(name).hash and r.name == name]
    return sorted(found, key=lambda record: record.seed)


def sharing_seeds() -> str:
    """Table 1's row with sharing alone, run by run: the errors, and the classes that each member masters."""
    rows = ["| seed | top-1 % | oracle % | classes that the members master |", "|--:|--:|--:|---|"]
    for record in seeds_of("cifar10-cnn-cmcl-sharing"):
        errors = record.errors["expected"]
        classes = [sum((right or 0) > MASTERED for right in member) for member in record.classwise]
        shares = ", ".join(map(str, sorted(classes, reverse=True)))
        rows.append(f"| {record.seed} | {errors['top1']:.2f} | {errors['oracle']:.2f} | {shares} |")
    return "\n".join(rows)


def svhn_whitened() -> str:
    """What SVHN's preparation is worth."""
    (whitened,) = (Record.load(path) for path in TRIED.glob("svhn-resnet20-ie--*"))
    ours = seeds_of("svhn-resnet20-ie")[0]
    paper = {
        cell.single: cell.paper["top1"]
        for cell in select(["table3"])
        if cell.paper and cell.name == ours.name
    }
    heads = "| top-1 %, ResNet-20, SVHN, seed 0 | paper | contrast and ZCA | mean and deviation |"
    rows = [heads, "|---|--:|--:|--:|"]
    for single, title in ((True, "single network"), (False, "IE")):
        errors = [fmean(r.members) if single else r.errors["expected"]["top1"] for r in (whitened, ours)]
        rows.append(f"| {title} | {paper[single]:.2f} | {errors[0]:.2f} | {errors[1]:.2f} |")
    return "\n".join(rows)


def sharing_variants() -> str:
    """Table 1's last row in short variants, a tenth of the training images held out."""
    rows = ["| beta | dropout | held-out top-1 / oracle % | test top-1 / oracle % |", "|--:|---|--:|--:|"]
    for record in tried("cifar10-cnn-cmcl-sharing-sampled-*"):
        recipe, both = record["recipe"], (record["validation"], record["errors"]["expected"])
        place = "before" if recipe["network_options"].get("drop_before_pool", True) else "after"
        errors = [f"{found['top1']:.2f} / {found['oracle']:.2f}" for found in both]
        rows.append(f"| {recipe['beta']:g} | {place} pooling | {' | '.join(errors)} |")
    return "\n".join(rows)


def adversarial() -> str:
    """IE with adversarial training beside two rows of Table 1, the first seed of each."""
    names = {
        "cifar10-cnn-ie": "IE",
        "cifar10-cnn-cmcl-sharing-sampled": "CMCL + feature sharing + stochastic labels",
        "cifar10-cnn-ie-adversarial": "IE, adversarial training",
    }
    rows = [
        "| five small CNNs, CIFAR-10, seed 0 | top-1 % | oracle % | members alone % |",
        "|---|--:|--:|--:|",
    ]
    for name, title in names.items():
        record = seeds_of(name)[0]
        errors, alone = record.errors["expected"], f"{min(record.members):.2f} to {max(record.members):.2f}"
        rows.append(f"| {title} | {errors['top1']:.2f} | {errors['oracle']:.2f} | {alone} |")
    return "\n".join(rows)


def _treated(ensemble: str, treatment: str) -> list[str]:
    """Top-1 and oracle error on test images, top-1 error on the others."""
    blocks = (ROOT / "results" / "dropout-at-test-h200.txt").read_text().split("\n## ")
    (block,) = (block for block in blocks if block.startswith(ensemble))
    (line,) = (line for line in block.splitlines() if line.startswith(f"{treatment} "))
    return re.findall(r"(?:top1|oracle) +([\d.]+)", line)[:3]


def masks() -> str:
    """CMCL with feature sharing against IE, with the mean of the masks at test and with masks drawn."""
    records = {
        record.name: record
        for record in load_records(ROOT / "results")
        if record.seed == 0 and record.name in RECIPES and record.recipe_hash == find(record.name).hash
    }
    rows = [
        "| recipe, seed 0 | IE top-1 % | CMCL, mean of masks | beside IE | CMCL, masks drawn | beside IE |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name, record in records.items():
        ie = records.get(f"{name.split('-cmcl')[0]}-ie")
        if ie and record.recipe["method"] == "cmcl" and record.recipe["sharing"]:
            key = _score(record.recipe)
            other = ie.errors["expected"][key]
            cells = [f"{other:.2f}"]
            for mode in ("expected", "sampled"):
                mine = record.errors[mode][key]
                cells += [f"{mine:.2f}", f"{100 * (mine / other - 1):+.1f} %".replace("-", "−")]
            rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _top1(record: dict[str, Any]) -> str:
    key = _score(record["recipe"])
    return f"{record['validation'][key]:.2f} | {record['errors']['expected'][key]:.2f}"


def _score(recipe: Mapping[str, Any]) -> str:
    """The paper's top-1 error: for segmentation that of the most confident member."""
    return "picked" if recipe["network"] == "fcn" else "top1"


def table_of(file: str, start: str) -> Callable[[], str]:
    """The table in a file of results/ whose first line begins so."""

    def find() -> str:
        text = (ROOT / "results" / file).read_text()
        return text[text.index(f"\n{start}") + 1 :].split("\n\n")[0].rstrip()

    return find


def whole(file: str) -> Callable[[], str]:
    """A file of results/ as it is."""
    return lambda: f"```text\n{(ROOT / 'results' / file).read_text().rstrip()}\n```"


TABLES: dict[str, Callable[[], str]] = {  # <!-- make:NAME --> ... <!-- make:end -->
    "zoo": zoo,
    "demo": demo,
    "rejecting": table_of("rejecting.txt", "| method | risk asked"),
    "scores": table_of("rejecting.txt", "| method | score"),
    "temperature": table_of("rejecting.txt", "| method | temperature"),
    "tuning": whole("tuning-digits.txt"),
    "export": whole("export-check.txt"),
    "onnx-speed": whole("onnx-speed.txt"),
    "icoseg": icoseg,
    "icoseg-search": icoseg_search,
    "small-cnn": small_cnn,
    "at-test": at_test,
    "at-test-held-out": held_out,
    "long-run": long_run,
    "trained-again": trained_again,
    "sharing-seeds": sharing_seeds,
    "svhn-whitened": svhn_whitened,
    "sharing-variants": sharing_variants,
    "adversarial": adversarial,
    "masks": masks,
}


def main() -> None:
    """Draw and fill all."""
    PICTURES.mkdir(exist_ok=True)
    with mpl.rc_context(STYLE):
        for name, (draw, _) in DRAWN.items():
            path = PICTURES / f"{name}.svg"
            draw(path)
            svg = path.read_text(encoding="utf-8").rstrip()
            path.write_text(f"{svg}\n<!-- docs/make.py, {digest(name)} -->\n", encoding="utf-8")
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        page.write_text(fill(text, "make", TABLES, page.name), encoding="utf-8")


if __name__ == "__main__":
    main()
