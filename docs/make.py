"""The figures and tables of these pages, made from results/ and zoo/: python docs/make.py

A picture carries a digest of its chart, and tables stand between two comments; a test compares both.
sharing.svg and answers.svg were drawn by hand.
"""

import ast
import hashlib
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import altair as alt

import cmcl
from cmcl.networks import NETWORKS
from cmcl.report import figures, modern
from cmcl.report.documents import fill
from cmcl.report.figures import Figure, Panel, Series, chart_of, colour_of, dash_of, panel_of
from cmcl.report.load import Run
from cmcl.report.page import paper_figures
from cmcl.report.tables import Table, dataset_title
from cmcl.reproduction import RECIPES, find
from cmcl.reproduction.cells import BESIDE_PAPER, CELLS, Evidence, select
from cmcl.reproduction.recipes import MODERN_RUNS
from cmcl.reproduction.record import (
    Calibration,
    Entropy,
    Errors,
    Record,
    Reliability,
    load_records,
    spread,
    spread_text,
)
from cmcl.reproduction.significance import Comparison
from cmcl.training.config import Augment

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PICTURES = ROOT / "docs" / "pictures"
MARGIN = 12  # pixels
ZOO = {"ie": "independent ensemble", "cmcl": "CMCL, K = 4"}
EVIDENCE = Evidence.of(load_records(RESULTS))
Groups = dict[str, tuple[str, dict[str, str]]]  # title -> stem of the recipes, their endings by method


def zoo_run(method: str, label: str = "") -> Run:
    """An ensemble of zoo/ with its entropies on SVHN and its risks, from results/rejecting.json."""
    record = Record.load(ROOT / "zoo" / f"cifar10-resnet20-{method}" / "record.json")
    found = json.loads((RESULTS / "rejecting.json").read_text())[method]
    names = {"specialised": "specialised", "other": "other", "ood": "unseen"}
    entropy = {new: [member[old] for member in found["members"]] for new, old in names.items()}
    averaged = found["ranking"]["mean_entropy"]
    entropy |= {"averaged": averaged["known"], "averaged_ood": averaged["unseen"]}
    risks = {"risk_coverage": found["risk_coverage"]["confidence"]}
    update = {
        "entropy": record.entropy | entropy,
        "ood": "svhn",
        "calibration": record.calibration | risks,
    }
    return Run.of(record.model_copy(update=update), label or f"{ZOO[method]}, AUROC {averaged['auroc']:.3f}")


def zoo_runs() -> list[Run]:
    """Both ensembles of zoo/ that the pages compare."""
    return [zoo_run(method, label) for method, label in ZOO.items()]


FLOWN = [  # lines of a picture of flights
    Series("hypothesis", "c1", [1, 0]),
    Series("one regressor", "c3", [5, 3]),
    Series("flown", "ink", [1, 0]),
]


def flights() -> Figure:
    """Futures of a few flights: hypotheses with their probabilities, one regressor, and the real one."""
    rows = json.loads((RESULTS / "flights-futures.json").read_text())
    below = len(rows) - figures.COLUMNS  # the panel with the legend, at the lower left
    panels = [flight(row, legend=i == below) for i, row in enumerate(rows)]
    return Figure("flights", "", "", panels, Table("flights", "", [], []))


def flight(row: dict[str, Any], *, legend: bool) -> Panel:
    """The panel of one flight, which flies to the right; a kilometre is as long on both axes."""
    tracks = [
        ("hypothesis", probability, [[0, 0], *points])
        for probability, points in zip(row["probabilities"], row["hypotheses"], strict=True)
    ]
    tracks += [("one regressor", 0.3, [[0, 0], *row["one"]]), ("flown", 0.3, [*row["seen"], *row["future"]])]
    points = [
        {"kind": kind, "track": t, "step": i, "x": x, "y": y, "probability": probability}
        for t, (kind, probability, track) in enumerate(tracks)
        for i, (x, y) in enumerate(track)
    ]
    guesses = [point for point in points if point["kind"] == "hypothesis"]
    last = max(point["step"] for point in guesses)
    ends = [point for point in guesses if point["step"] == last and point["probability"] >= 0.1]
    x, y = [-30, 90], [-40, 50]
    below = alt.Legend(title=None, orient="bottom", symbolOpacity=1) if legend else None
    axes = {
        "x": alt.X("x:Q", title="ahead, km").scale(domain=x).axis(tickCount=6),
        "y": alt.Y("y:Q", title="to the left, km").scale(domain=y).axis(tickCount=5),
    }
    style = {
        "color": colour_of("kind", FLOWN).legend(below),
        "strokeDash": dash_of("kind", FLOWN).legend(below),
        "strokeWidth": alt.StrokeWidth("probability:Q", legend=None).scale(domain=[0, 1], range=[0.8, 5]),
        "detail": "track:N",
        "order": "step:Q",
    }
    layers = [  # what was flown is drawn last, above the hypotheses
        chart_of(part).mark_line(opacity=opacity).encode(**axes, **style)
        for part, opacity in ((guesses, 0.6), (points[len(guesses) :], 1))
    ]
    texts = chart_of(ends).mark_text(align="left", dx=5, fontSize=10, color="@c1")
    layers.append(texts.encode(**axes, text=alt.Text("probability:Q", format=".0%")))
    height = figures.WIDTH * (y[1] - y[0]) / (x[1] - x[0])
    title = f"quantile {row['quantile']:g}, spread {row['spread']:.1f} km"
    return panel_of(title, alt.layer(*layers), height)


CONTENDERS = ("plain loop, IE", "torch.vmap, IE", "tabm.LinearEnsemble, IE", "cmcl.fit, CMCL")


def speed() -> Figure:
    """Milliseconds of a training step and member against M, of small networks on a CPU."""
    lines = (RESULTS / "bench" / "peers-mlp-cpu.jsonl").read_text().splitlines()
    points = [
        {"M": row["members"], "ms": round(median(row["ms"]) / row["members"], 4), "who": row["contender"]}
        for row in map(json.loads, lines)
        if row["contender"] in CONTENDERS
    ]
    known = figures.series(CONTENDERS, {"cmcl.fit, CMCL": "cmcl", "plain loop, IE": "ie"})
    x = alt.X("M:Q", title="members").scale(type="log", nice=False, padding=12).axis(values=[1, 2, 5, 10, 25])
    y = alt.Y("ms:Q", title="ms a step and member")
    colour = colour_of("who", known).legend(title=None)
    lines = chart_of(points).mark_line(point=True).encode(x=x, y=y, color=colour)
    return Figure("speed", "", "", [panel_of("", lines, 300)], Table("speed", "", [], []))


FIGURES: dict[str, Callable[[], Figure | None]] = {
    "speed": speed,
    "figure1": lambda: paper_figures(EVIDENCE)["1"],
    "figure2": lambda: paper_figures(EVIDENCE)["2"],
    "segmentation": lambda: paper_figures(EVIDENCE)["4"],
    "who-knows-what": lambda: figures.heat_maps("who-knows-what", "", zoo_runs()),
    "entropy": lambda: figures.entropies("entropy", "", zoo_runs()),
    "unseen": lambda: figures.entropies("unseen", "", [zoo_run(m) for m in ZOO], averaged=list(ZOO)),
    "rejecting": lambda: figures.risk_coverage("rejecting", "", zoo_runs()),
    "flights": flights,
    "modern-seconds": lambda: modern.error_against_seconds(EVIDENCE),
    "modern-size": lambda: modern.gain_against_size(EVIDENCE),
    "tuning": lambda: figures.tuning(json.loads((RESULTS / "tuning-digits.json").read_text())),
}


def digest(figure: Figure) -> str:
    """A digest of the chart."""
    return hashlib.sha256(json.dumps(figures.joined(figure), sort_keys=True).encode()).hexdigest()[:16]


def table(heads: str, rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; heads are separated by |, and > before one aligns its column to the right."""
    titles = [title.strip() for title in heads.split("|")]
    lines = [
        [title.lstrip("> ") for title in titles],
        ["--:" if t.startswith(">") else "---" for t in titles],
    ]
    texts = [" | ".join(map(str, row)) for row in (lines[0], *rows)]
    return "\n".join([f"| {texts[0]} |", f"|{'|'.join(lines[1])}|", *(f"| {text} |" for text in texts[1:])])


def both(errors: Any) -> str:
    """Top-1 and oracle error."""
    return f"{errors['top1']:.2f} / {errors['oracle']:.2f}"


def scored(record: Record, errors: Any) -> float:
    """The error that the paper calls top-1: for segmentation, of the most confident member."""
    return errors["picked" if record.dense else "top1"]


def seeds_of(name: str) -> list[Record]:
    """The records of a recipe, by seed."""
    cells = (*CELLS, *BESIDE_PAPER)
    return next((EVIDENCE.filling[cell.id] for cell in cells if cell.name == name), [])


def tried(pattern: str) -> list[Record]:
    """Records that fill no cell, with held-out images, the best on those first."""
    records = [Record.load(path) for path in sorted((RESULTS / "tried").glob(pattern))]
    return sorted((r for r in records if r.validation), key=lambda r: scored(r, r.validation))


def top1(record: Record) -> list[str]:
    """Held-out and test error."""
    return [f"{scored(record, errors):.2f}" for errors in (record.validation, record.errors["expected"])]


def zoo() -> str:
    """The two ensembles of zoo/ side by side."""
    rows = []
    for method, name in ZOO.items():
        record = Record.load(ROOT / "zoo" / f"cifar10-resnet20-{method}" / "record.json")
        errors, calibration = record.errors["expected"], record.calibration
        scaled = halves_ece(record.name)
        numbers = (errors["top1"], errors["oracle"], fmean(record.members), calibration["ece"], scaled)
        rows.append([name, *(f"{number:.2f} %" for number in numbers), f"{calibration['nll']:.3f}"])
    return table("method |> top-1 |> oracle |> members alone |> ECE |> scaled ECE |> NLL", rows)


def modern_title(base: str) -> str:
    """Dataset and network of a base of `cmcl reproduce modern`, as in a table."""
    recipe = find(f"{base}-modern-ie")
    width = recipe.network_options.get("width", 16)
    network = NETWORKS[str(recipe.network)].title + (f" of width {width}" if width != 16 else "")
    return f"{dataset_title(recipe.data)}, {network}, modern recipe"


PAPER = {"IE": "-ie", "MCL": "-mcl", "CMCL": "-cmcl"}
TODAY = {
    "IE": "-ie",
    "CMCL, the library's default": "-cmcl",
    "CMCL, plain, beta 0.75": "-cmcl-paper-beta",
    "CMCL, default with shared features": "-cmcl-sharing",
    "CMCL, shared features, beta 0.75": "-cmcl-sharing-paper-beta",
}
TODAY[modern.METHODS["single"]] = "-single"
MODERN = {modern_title(base): (f"{base}-modern", TODAY) for base, *_ in MODERN_RUNS}
GROUPS = {  # of the README's results: title -> recipes by method; those without a record are left out
    "CIFAR-10, ResNet-20": ("cifar10-resnet20", PAPER),
    "SVHN, ResNet-20": ("svhn-resnet20", PAPER),
    "CIFAR-10, small CNN": (
        "cifar10-cnn",
        {
            "IE": "-ie",
            "IE, adversarial training": "-ie-adversarial",
            "MCL": "-mcl",
            "CMCL": "-cmcl-sharing-sampled",
            "CMCL, the library's default": "-cmcl-default",
            "CMCL, plain": "-cmcl",
        },
    ),
    "CIFAR-10, ResNet-20, modern recipe": ("cifar10-resnet20-w16-modern", TODAY),
}
LARGE = {
    "CIFAR-10, VGGNet-17": ("cifar10-vggnet17", PAPER),
    "CIFAR-10, GoogLeNet-18": ("cifar10-googlenet18", PAPER),
}
MORE = MODERN | LARGE


def spread_of(values: Sequence[float]) -> str:
    """Mean and standard deviation, with spaces that do not break."""
    return spread_text(spread(values)).replace(" ", "\u00a0")


def compared(mine: str, other: str, key: str = "top1") -> Comparison:
    """Two recipes' errors and the test of their difference."""
    return Comparison.of(seeds_of(mine), seeds_of(other), key)


def mean_error(runs: Sequence[Record]) -> str:
    """Mean top-1 error and number of runs, for a sentence."""
    return f"{fmean(run.scores['top1'] for run in runs):.2f} % (n = {len(runs)})"


def p_value(comparison: Comparison) -> str:
    """For a table."""
    p = comparison.p_value
    return "–" if p is None else "<\u00a00.001" if p < 0.001 else f"{p:.2g}"


def p_text(comparison: Comparison) -> str:
    """For a sentence: "p < 0.001" or "p = 0.44"."""
    value = p_value(comparison)
    return f"p {value}" if value.startswith("<") else f"p = {value}"


def halves_ece(name: str) -> float | None:
    """ECE in percent of an ensemble of zoo/ on one half of the test images, with the temperature of the other."""
    calibrated = json.loads((RESULTS / "zoo-calibrated.json").read_text())
    if name in calibrated:
        return calibrated[name]["tested"]["scaled_ece"]
    known = json.loads((RESULTS / "rejecting.json").read_text())
    methods = {f"cifar10-resnet20-{method}": method for method in ZOO}
    return known[methods[name]]["tempered"]["after"]["ece"] if name in methods else None


def ece(runs: Sequence[Record]) -> str:
    """Raw and, where it is measured, after temperature scaling."""
    raw = spread_of([run.calibration["ece"] for run in runs])
    keys = "scaled_ece", "cross_fitted_ece"
    scaled = [run.calibration[key] for run in runs for key in keys if key in run.calibration]
    if len(scaled) < len(runs):
        scaled = []
    if not scaled and (of_zoo := halves_ece(runs[0].name)) is not None:
        scaled = [of_zoo]
    return f"{raw} → {spread_of(scaled)}" if scaled else raw


def measured(groups: Groups) -> str:
    """Errors, calibration and training time of each method that has records."""
    rows = []
    for title, (stem, methods) in groups.items():
        found = {method: runs for method, suffix in methods.items() if (runs := seeds_of(stem + suffix))}
        best = min((fmean(r.scores["top1"] for r in runs) for runs in found.values()), default=None)
        for method, runs in found.items():
            top1s, oracles = ([run.scores[key] for run in runs] for key in ("top1", "oracle"))
            bold = "**" if fmean(top1s) == best else ""
            against = p_value(Comparison.of(runs, found["IE"])) if method != "IE" and "IE" in found else ""
            errors = f"{bold}{spread_of(top1s)}{bold}", against, spread_of(oracles)
            time = times(time_ratio(runs, found["IE"]) if "IE" in found else None)
            first = method == next(iter(found))
            rows.append([title if first else "", method, *errors, ece(runs), time, len(runs)])
    heads = (
        "five members | method |> top-1 error % ↓ |> p |> oracle error % ↓ |> ECE % ↓ |> training time |> n"
    )
    return table(heads, rows)


def results() -> str:
    """Our main numbers: IE, MCL and CMCL on each dataset and network that has records."""
    return measured(GROUPS)


def modern_results() -> str:
    """The recipes of `cmcl reproduce modern` that are trained."""
    runs = [seeds_of(name) for _, _, name in MODERN_RUNS]
    trained = [one for one in runs if one]
    count = f"{len(trained)} of {len(runs)} recipes are trained, {sum(map(len, trained))} runs"
    if not trained:
        return f"{count}."
    drawn = [
        figure
        for make in (modern.error_against_seconds, modern.gain_against_size)
        if (figure := make(EVIDENCE))
    ]
    shown = [f"{one.caption}\n\n![{one.title}](../pictures/{one.id}.svg)" for one in drawn]
    return "\n\n".join([f"{count}:", measured(MODERN), *shown])


WELL = "docs/start/when-to-use.md#members-that-are-trained-well"


def pairs() -> list[tuple[str, list[Record], list[Record]]]:
    """Every setting with records of IE and CMCL: title, IE's runs, CMCL's."""
    found = []
    for title, (stem, methods) in (GROUPS | MORE).items():
        for method in (m for m in methods if m.startswith("CMCL")):
            ie, ours = seeds_of(f"{stem}-ie"), seeds_of(stem + methods[method])
            if ie and ours:
                found.append((title + method.removeprefix("CMCL"), ie, ours))
    return found


def fastest(runs: Sequence[Record]) -> float:
    """Seconds; other runs may have shared the GPU."""
    return min(run.seconds for run in runs)


def time_ratio(runs: Sequence[Record], ie: Sequence[Record]) -> float | None:
    """Training time relative to IE. None if either side has one short run: much of its time is compilation."""
    if any(len(some) == 1 and fastest(some) < 180 for some in (runs, ie)):
        return None
    return fastest(runs) / fastest(ie)


def times(ratio: float | None) -> str:
    """For a table."""
    return "–" if ratio is None else f"{ratio:.2f}×"


def evidence() -> str:
    """IE against CMCL in all settings."""
    rows = []
    for title, ie, ours in pairs():
        top1, oracle = (Comparison.of(ours, ie, key) for key in ("top1", "oracle"))
        rows.append(
            [
                title,
                f"{fmean(member for run in ie for member in run.members):.2f}",
                f"{top1.other['mean']:.2f}",
                f"{top1.mine['mean']:.2f}",
                f"{-top1.gain:+.1f} %".replace("-", "−"),
                p_value(top1),
                f"{oracle.other['mean']:.2f} → {oracle.mine['mean']:.2f}",
                f"{len(ie)}, {len(ours)}",
            ]
        )
    heads = "five members |> one of IE alone % |> IE % |> CMCL % |> change |> p |> oracle %: IE → CMCL |> n"
    return table(heads, rows)


def costs() -> str:
    """Seconds of training."""
    rows = [
        [title, f"{fastest(ie):,.0f}", f"{fastest(ours):,.0f}", times(ratio)]
        for title, ie, ours in pairs()
        if (ratio := time_ratio(ours, ie)) is not None
    ]
    return table("five members, one H200, fastest run |> IE, s |> CMCL, s |> ratio", rows)


DESCRIBED = (
    *(cmcl.Recipe, Augment, cmcl.Options, cmcl.Result, cmcl.Prediction, cmcl.OracleLoss, cmcl.WinnerTakesAll),
    *(cmcl.Layer, Record, Errors, Calibration, Reliability, Entropy),
)
KINDS = {
    "Count": "int ≥ 1",
    "Positive": "float > 0",
    "NotNegative": "float ≥ 0",
    "Probability": "float in [0, 1]",
}
KINDS |= {"Percent": "float in [0, 100]", "Histogram": "list[int]"}
COUNTED = {"Count": "int ≥ 0"}  # of records
BOUNDED = re.compile(r"Annotated\[(\w+), Field\(([^)]*)\)\]")
BOUNDS = {"ge=": "≥ ", "gt=": "> ", "le=": "≤ ", "lt=": "< "}


def bounded(found: re.Match[str]) -> str:
    """`int ≥ 0` of `Annotated[int, Field(ge=0)]`."""
    limits = found[2]
    for word, sign in BOUNDS.items():
        limits = limits.replace(word, sign)
    return f"{found[1]} {limits}"


def fields(described: type) -> Callable[[], str]:
    """The fields of a public class: type, default and meaning, from its source."""

    def find() -> str:
        source = textwrap.dedent(inspect.getsource(described))
        lines, rows = source.splitlines(), []
        (body,) = ast.parse(source).body
        for node in body.body:
            if not isinstance(node, ast.AnnAssign) or node.target.id.startswith("_"):
                continue
            first = node.lineno - 1
            while first and lines[first - 1].strip().startswith("#"):
                first -= 1
            above = [line.strip().lstrip("# ") for line in lines[first : node.lineno - 1]]
            comment = lines[node.end_lineno - 1].partition("  # ")[2].strip()
            kind, default = (
                ast.unparse(node.annotation),
                "" if node.value is None else ast.unparse(node.value),
            )
            if made := re.fullmatch(r"[fF]ield\(default_factory=(\w+).*\)", default):
                default = {"dict": "{}", "list": "[]"}.get(made[1], f"{made[1]}()")
            elif default.isupper():  # a constant
                default = repr(getattr(inspect.getmodule(described), default))
            kind = re.sub(r"Annotated\[(.+), Field\(min_length=1\)\]", r"\1", kind)
            for alias, plain in (
                KINDS | (COUNTED if described.__module__ == Record.__module__ else {})
            ).items():
                kind = re.sub(rf"\b{alias}\b", plain, kind)
            shown = BOUNDED.sub(bounded, kind)
            shown = shown.replace(" | ", " or ")
            default = default and f"`{default}`"
            meaning = " ".join([*above, comment]).strip()
            rows.append([f"`{node.target.id}`", meaning, f"`{shown}`", default])
        return table("field | meaning | type | default", rows)

    return find


def tagline() -> str:
    """What cmcl does and what it costs."""
    time = max(ratio for _, ie, ours in pairs() if (ratio := time_ratio(ours, ie)) is not None)
    return (
        "`cmcl` trains an ensemble of M PyTorch networks that specialise in different parts of the data. Where one network "
        "is weak,\nthe averaged prediction often has fewer errors than that of M independent networks, more predictions can "
        "be kept at a given\nerror rate, and the right class is far more often among the members' predictions (oracle error). "
        "Where one network is good,\nthe average is seldom better. On CIFAR-10 and SVHN, training took at most "
        f"{time:.1f} times as long as that of independent networks."
    )


def coverage_at(risk: float, record: Record) -> int:
    """The largest percentage of predictions, the most confident first, with at most this error in percent."""
    errors = record.calibration["risk_coverage"]
    return max((i for i, error in enumerate(errors, 1) if error <= risk), default=0)


def flown() -> dict[str, dict[str, float]]:
    """Mean scores of the flights by method."""
    methods = json.loads((RESULTS / "flights.json").read_text())["methods"]
    return {name: {key: fmean(run[key] for run in runs) for key in runs[0]} for name, runs in methods.items()}


def held_out_setting(setting: str) -> dict[str, str]:
    """A setting of benchmarks/defaults.py against IE on the datasets that the default was not chosen on."""
    text = (RESULTS / "defaults.txt").read_text().partition("Datasets held out")[2]
    pattern = (
        rf"^{re.escape(setting)} .*difference +(?P<gap>\S+) .*better in (?P<better>\d+), "
        r"worse in (?P<worse>\d+) of (?P<cells>\d+)"
    )
    found = re.search(pattern, text, re.MULTILINE)
    assert found, setting
    return found.groupdict() | {"gap": found["gap"].replace("-", "−")}


def good_for() -> str:
    """What the records speak for."""
    mine, other = "cifar10-resnet20-cmcl", "cifar10-resnet20-ie"
    best = compared(mine, other)
    (ours, *_), (ie, *_) = seeds_of(mine), seeds_of(other)
    oracle = [
        compared(f"{stem}-cmcl", f"{stem}-ie", "oracle") for stem in ("cifar10-resnet20", "svhn-resnet20")
    ]
    default, smooth, both = (
        held_out_setting(name) for name in ("default", "ie + smoothing", "k4 + smoothing")
    )
    ade = flown()
    lines = [
        f"**Members that are weak alone.** Five ResNet-20 on CIFAR-10, trained as in the paper: "
        f"{best.mine['mean']:.2f} instead of {best.other['mean']:.2f} % top-1 error, {p_text(best)} "
        "([results](docs/reproduction/results.md)).",
        "**A short list of predictions.** The right class is more often among those of the members: an oracle error of "
        + " and ".join(f"{c.mine['mean']:.2f} instead of {c.other['mean']:.2f} %" for c in oracle)
        + " on CIFAR-10 and SVHN.",
        f"**Abstaining.** On CIFAR-10, the most confident {coverage_at(2, ours)} % of CMCL's predictions have at most 2 % errors, "
        f"the most confident {coverage_at(2, ie)} % of IE's ([calibrate and abstain](docs/tutorials/calibration.md)).",
        f"**Small MLPs on tables.** On five held-out datasets the default is significantly better than IE in "
        f"{default['better']} of {default['cells']} settings and worse in {default['worse']}. Its mean difference to IE is "
        f"{default['gap']} points, that of IE with label smoothing {smooth['gap']}, that of CMCL with it {both['gap']} "
        "([the default](docs/guides/choosing-beta-and-k.md#the-default)).",
        f"**Targets with several good answers.** The best of the hypotheses for a flight is "
        f"{ade['winner takes all']['minADE']:.2f} km off, IE's {ade['independent ensemble']['minADE']:.2f} km "
        "([several hypotheses](docs/tutorials/hypotheses.md)).",
    ]
    return "\n".join(f"- {line}" for line in lines)


def not_for() -> str:
    """What the records speak against."""
    mine, other = "cifar10-resnet20-cmcl", "cifar10-resnet20-ie"
    (ours, *_), (ie, *_) = seeds_of(mine), seeds_of(other)
    vgg = compared("cifar10-vggnet17-cmcl", "cifar10-vggnet17-ie")
    today = compared("cifar10-resnet20-w16-modern-cmcl", "cifar10-resnet20-w16-modern-ie")
    shared, single = (
        seeds_of(f"cifar10-resnet20-w16-modern-{name}") for name in ("cmcl-sharing-paper-beta", "single")
    )
    found = json.loads((RESULTS / "rejecting.json").read_text())
    auroc = found["cmcl"]["ranking"]["disagreement"]["auroc"], found["ie"]["ranking"]["disagreement"]["auroc"]
    lines = [
        f"**Members that must work alone.** A member of CMCL alone has {fmean(ours.members):.2f} % errors, one of IE "
        f"{fmean(ie.members):.2f} %. With shared features no member can be removed.",
        f"**Probabilities that are not calibrated.** The averaged prediction is underconfident by design: ECE "
        f"{ece([ours])} % with [temperature scaling](docs/tutorials/calibration.md#temperature-scaling), IE's {ece([ie])} %.",
        f"**Members that are good alone.** Five VGGNet-17 on CIFAR-10: {vgg.mine['mean']:.2f} against IE's "
        f"{vgg.other['mean']:.2f} %, {p_text(vgg)}; five ResNet-20 with a [modern recipe]({WELL}) and "
        f"the default: {today.mine['mean']:.2f} against {today.other['mean']:.2f} %, {p_text(today)}; with shared features "
        f"and beta = 0.75: {mean_error(shared)}. There, one network with as many weights as the five has {mean_error(single)}.",
        f"**The members' disagreement as uncertainty.** It separates SVHN from CIFAR-10 with an AUROC of {auroc[0]:.2f}, "
        f"IE's with {auroc[1]:.2f} ([scores](docs/tutorials/calibration.md#uncertainty-scores)).",
        "**Many classes with few images each,** such as CIFAR-100: others report that CMCL loses its advantage. We "
        "have not measured it ([is CMCL for me?](docs/start/when-to-use.md)).",
    ]
    return "\n".join(f"- {line}" for line in lines)


def verdicts() -> str:
    """What the records speak for and against."""
    return f"**Good for**\n\n{good_for()}\n\n**Not for**\n\n{not_for()}"


def demo() -> str:
    """The demo's settings on the seeds that they were not chosen on."""
    lines = (RESULTS / "demo-seeds.txt").read_text(encoding="utf-8").splitlines()
    rows = [re.split(r"\s{2,}", line) for line in lines if line.count("±") == 4]
    names = {"single": "one network", "ie": "independent ensemble", "mcl": "MCL", "cmcl": "**CMCL**"}
    seeds = next(line for line in lines if " seeds, " in line).split(",")[0]
    verdict = next(line for line in lines if line.startswith("CMCL's top-1"))
    heads = f"{seeds} |> top-1 error % |> oracle error % |> ECE % |> scaled ECE %"
    found = table(heads, [[names[row[0]], *row[1:]] for row in rows])
    return f"{found}\n\n{verdict}."


def icoseg() -> str:
    """Figures 4b and 4c as a table; one member alone is the same for every method."""
    rows = []
    for m in range(1, 6):
        cells = [
            EVIDENCE.cells[f"fig4bc/icoseg-fcn-m{m}-{method}"]["ours"] for method in ("ie", "mcl", "cmcl")
        ]
        keys = ("picked", "top1", "oracle")
        rows.append([m, *(f"{ours[key]['mean']:.2f}" if ours else "–" for key in keys for ours in cells)])
    scores = ("most confident member", "averaged prediction", "oracle")
    heads = [f"{score}: {method}" for score in scores for method in ("IE", "MCL", "CMCL")]
    return table(" |> ".join(["> members", *heads]), rows)


def icoseg_search() -> str:
    """The errors that the learning rates and beta were chosen by."""
    rows = []
    for method in ("ie", "mcl", "cmcl"):
        for record in tried(f"icoseg-fcn-m5-{method}-*"):
            recipe, beta = record.recipe, f"{record.recipe['beta']:g}" if method == "cmcl" else "–"
            rows.append([method.upper(), f"{recipe['lr']:g}", beta, *top1(record)])
    return table("method |> learning rate |> beta |> held-out top-1 % |> test top-1 %", rows)


def small_cnn() -> str:
    """One small CNN in variants."""
    rows = []
    for record in sorted(tried("cifar10-cnn-ie-*"), key=lambda r: -r.recipe["steps"]):  # stable: best first
        recipe = record.recipe
        changes = [f"`{name}={value}`" for name, value in recipe["network_options"].items()]
        usual = {"lr": 0.01, "weight_decay": 5e-4}
        changes += [f"`{name}={recipe[name]:g}`" for name, value in usual.items() if recipe[name] != value]
        changes += [f"`preprocess={recipe['preprocess']}`"] * (recipe["preprocess"] != "gcn_zca")
        epochs = recipe["steps"] * recipe["batch_size"] / (50_000 * (1 - recipe["validation"]))
        rows.append([f"{epochs:.0f}", ", ".join(changes) or "nothing", *top1(record)])
    heads = "> epochs | differs from the authors' code by |> held-out top-1 % |> test top-1 %"
    return table(heads, rows)


def modern_cpu() -> str:
    """The small version of today's training: mean ± standard deviation over seeds."""
    found = json.loads((RESULTS / "modern-cpu.json").read_text())
    rows = []
    for width, setting in dict.fromkeys((row["width"], row["setting"]) for row in found):
        own = [row for row in found if (row["width"], row["setting"]) == (width, setting)]
        keys = ("top1", "oracle", "member", "ece", "scaled_ece")
        spreads = [spread_of([row[key] for row in own]) for key in keys]
        rows.append([width, setting, *spreads, len(own)])
    return table("> width | method |> top-1 % |> oracle % |> member % |> ECE % |> scaled ECE % |> n", rows)


TREATMENTS = {  # of dropout before max-pooling at test time, as benchmarks/dropout_at_test.py calls them
    "shrunk": "halved (the authors' code)",
    "expected": "mean over the masks",
    "drawn 8 times": "eight draws, averaged",
}


def treated(ensemble: str, treatment: str) -> list[str]:
    """Top-1 and oracle error on test images, top-1 error on the others."""
    blocks = (RESULTS / "dropout-at-test-h200.txt").read_text().split("\n## ")
    (block,) = (block for block in blocks if block.startswith(ensemble))
    (line,) = (line for line in block.splitlines() if line.startswith(f"{treatment} "))
    return re.findall(r"(?:top1|oracle) +([\d.]+)", line)[:3]


def at_test() -> str:
    """Table 1's ensembles under other treatments of dropout at test time, beside the paper's numbers."""
    rows = []
    for cell in select(["table1"]):
        found = [treated(f"{cell.name}--", treatment) for treatment in TREATMENTS]
        test = [f"{numbers[0]} / {numbers[1]}" for numbers in found]
        printed = both(cell.paper) if cell.paper else "–"
        rows.append([f"`{cell.name}`", printed, *test, *(numbers[2] for numbers in found[:2])])
    heads = ["top-1 / oracle %", "paper", *TREATMENTS.values(), "training top-1 %: halved", "mean"]
    return table(" |> ".join(heads), rows)


def held_out() -> str:
    """One network under the same treatments, on held-out training images."""
    found = {title: treated("cifar10-cnn-ie-members1", name) for name, title in TREATMENTS.items()}
    heads = "dropout before pooling, at test |> held-out top-1 % |> test top-1 %"
    return table(heads, [[title, other, test] for title, (test, _, other) in found.items()])


def long_run() -> str:
    """One network trained in full, with dropout before and after pooling."""
    ie = seeds_of("cifar10-cnn-ie")[0].members
    (path,) = (RESULTS / "tried").glob("cifar10-cnn-ie-dropbeforepoolfalse-members1--*")
    alone = f"{fmean(ie):.2f} ({min(ie):.2f} to {max(ie):.2f})"
    rows = [["dropout before pooling, mean over the masks (IE's five members)", alone]]
    rows += [["dropout after pooling", f"{fmean(Record.load(path).members):.2f}"]]
    return table("one network, 200 epochs |> test top-1 %", rows)


def trained_again() -> str:
    """The rows of Table 1 that were trained more than once, run by run."""
    rows, earlier = [], (RESULTS / "dropout-factors-h200.txt").read_text()
    for cell in select(["table1"]):
        first, *others = (r.errors["expected"] for r in seeds_of(cell.name))
        other, which = (others or [None])[0], "another seed"
        if other is None and f"## {cell.name}--" in earlier:
            block = earlier[earlier.index(f"## {cell.name}--") :].partition("expected pooling ")[2]
            found = re.findall(r"(top1|oracle) +([\d.]+)", block.partition("\n")[0])[:2]
            other, which = {key: float(value) for key, value in found}, "the same seed, an earlier training"
        if other and cell.paper:
            rows.append([f"`{cell.name}`", *map(both, (cell.paper, first, other)), which])
    return table("top-1 / oracle % |> paper |> first run |> another | ", rows)


def sharing_seeds() -> str:
    """Table 1's row with sharing alone, run by run: errors, and classes with over 90 % accuracy by member."""
    rows = []
    for record in seeds_of("cifar10-cnn-cmcl-sharing"):
        errors = record.errors["expected"]
        classes = sorted((sum((x or 0) > 90 for x in member) for member in record.classwise), reverse=True)
        listed = ", ".join(map(str, classes))
        rows.append([record.seed, f"{errors['top1']:.2f}", f"{errors['oracle']:.2f}", listed])
    return table("> seed |> top-1 % |> oracle % | classes that each member specialises in", rows)


def svhn_whitened() -> str:
    """SVHN with two kinds of preprocessing."""
    (path,) = (RESULTS / "tried").glob("svhn-resnet20-ie--*")
    whitened, ours, rows = Record.load(path), seeds_of("svhn-resnet20-ie")[0], []
    cells = {c.single: c for c in select(["table3"]) if c.paper and c.name == ours.name}
    for single, title in ((True, "single network (mean of IE's members)"), (False, "IE")):
        errors = [cells[single].errors(record)["top1"] for record in (whitened, ours)]
        rows.append([title, *(f"{error:.2f}" for error in (cells[single].paper["top1"], *errors))])
    return table(
        "top-1 %, ResNet-20, SVHN, seed 0 |> paper |> contrast and ZCA |> mean and standard deviation", rows
    )


def sharing_variants() -> str:
    """Table 1's last row in short variants, a tenth of the training images held out."""
    rows = []
    for record in tried("cifar10-cnn-cmcl-sharing-sampled-*"):
        before = record.recipe["network_options"].get("drop_before_pool", True)
        errors = map(both, (record.validation, record.errors["expected"]))
        rows.append([f"{record.recipe['beta']:g}", f"{'before' if before else 'after'} pooling", *errors])
    return table("> beta | dropout |> held-out top-1 / oracle % |> test top-1 / oracle %", rows)


def adversarial() -> str:
    """IE with adversarial training beside two rows of Table 1, the first seed of each."""
    names = {
        "cifar10-cnn-ie": "IE",
        "cifar10-cnn-cmcl-sharing-sampled": "CMCL + feature sharing + stochastic labels",
        "cifar10-cnn-ie-adversarial": "IE, adversarial training",
    }
    rows = []
    for name, title in names.items():
        record = seeds_of(name)[0]
        errors, alone = record.errors["expected"], f"{min(record.members):.2f} to {max(record.members):.2f}"
        rows.append([title, f"{errors['top1']:.2f}", f"{errors['oracle']:.2f}", alone])
    return table("five small CNNs, CIFAR-10, seed 0 |> top-1 % |> oracle % |> members alone %", rows)


def masks() -> str:
    """CMCL with feature sharing against IE, with the mean of the masks at test time and with masks drawn."""
    records = {name: runs[0] for name in sorted(RECIPES) if (runs := seeds_of(name))}
    rows = []
    for name, record in records.items():
        ie = records.get(f"{name.split('-cmcl')[0]}-ie")
        if ie and record.recipe["method"] == "cmcl" and record.recipe["sharing"]:
            other = scored(ie, ie.errors["expected"])
            cells = [f"{other:.2f}"]
            for mode in ("expected", "sampled"):
                mine = scored(record, record.errors[mode])
                cells += [f"{mine:.2f}", f"{100 * (mine / other - 1):+.1f} %".replace("-", "−")]
            rows.append([name, *cells])
    heads = (
        "recipe, seed 0 |> IE top-1 % |> CMCL, mean of masks |> beside IE |> CMCL, masks drawn |> beside IE"
    )
    return table(heads, rows)


def fine_tuning() -> str:
    """Errors of the fine-tuned network of timm, mean and standard deviation over the seeds."""
    found, rows = json.loads((RESULTS / "fine-tuning.json").read_text()), []
    for name, runs in found["methods"].items():
        errors = [spread_of([run[key] for run in runs]) for key in ("top1", "oracle", "member")]
        rows.append([name, *errors, len(runs)])
    facts = found["environment"]
    made = f"torch {facts['torch']}, timm {facts['timm']}, one CPU thread; commit {facts['commit'][:7]}"
    heads = "method |> top-1 error % |> oracle error % |> member error % |> n"
    return f"{table(heads, rows)}\n\n{made}."


def hypotheses() -> str:
    """Scores of the flights by method, mean and standard deviation over the seeds."""
    heads = {
        "minADE": "minADE, km",
        "minFDE": "minFDE, km",
        "ade": "ADE, km",
        "score ECE %": "score ECE, %",
        "final NLL": "NLL of the last position",
    }
    rows = []
    for name, runs in json.loads((RESULTS / "flights.json").read_text())["methods"].items():
        rows.append([name, *(spread_of([run[key] for run in runs]) for key in heads), len(runs)])
    return table(" |> ".join(["method, mean ± standard deviation", *heads.values(), "n"]), rows)


def meshes() -> str:
    """The largest differences between several processes and one, by case."""
    lines = table_of("mesh.txt", "| case | mesh | telemetry")().splitlines()[2:]
    found: dict[str, list[list[str]]] = {}
    for case, *rest in (line.strip("| ").split(" | ") for line in lines):
        found.setdefault(case, []).append(rest)
    rows = []
    for case, runs in found.items():
        largest = [f"{max(float(run[column]) for run in runs):.1e}" for column in (1, 2)]
        rows.append([case, len(runs), *largest, " and ".join(sorted({run[3] for run in runs}))])
    return table("case |> meshes of 1, 2 and 4 processes |> telemetry |> weights | test errors", rows)


def shared_gpu() -> str:
    """Whether the recorded tests on a GPU include processes that share it."""
    _, machine, *lines = (RESULTS / "gpu-tests.txt").read_text().splitlines()
    passed = sum(line.startswith("PASSED tests/test_mesh.py::TestOnOneGPU") for line in lines)
    where = "recorded in [results/gpu-tests.txt](../../results/gpu-tests.txt)"
    if not passed:
        return f"None of them is {where} so far. `pytest -m cuda tests/test_mesh.py` runs them."
    return f"On one {machine.partition(',')[0]}, {passed} of them passed, {where}."


def table_of(file: str, start: str) -> Callable[[], str]:
    """The table in a file of results/ whose first line begins so."""

    def find() -> str:
        text = (RESULTS / file).read_text()
        return text[text.index(f"\n{start}") + 1 :].split("\n\n")[0].rstrip()

    return find


def selective() -> str:
    """Coverage and error of selective prediction, by method and risk."""
    lines = table_of("rejecting.txt", "| method | risk asked")().splitlines()
    heads = "method |> risk |> coverage, calibration half |> bound |> coverage, test half |> errors |> error"
    return table(heads, [line.strip("| ").split(" | ") for line in lines[2:]])


def faults() -> str:
    """Faults and outcomes, from results/faults.json."""
    found = json.loads((RESULTS / "faults.json").read_text())
    rows = [[one[k] for k in ("fault", "where", "count", "as_expected", "outcome")] for one in found["rows"]]
    made = f"`{found['command']}`; torch {found['torch']}, {found['device']}; commit {found['commit']}"
    return f"{table('fault | where | >number | >as it should | what should happen', rows)}\n\n{made}."


def whole(file: str) -> Callable[[], str]:
    """A file of results/ as it is."""
    return lambda: f"```text\n{(RESULTS / file).read_text().rstrip()}\n```"


TABLES: dict[str, Callable[[], str]] = {  # <!-- make:NAME --> ... <!-- make:end -->
    "tagline": tagline,
    "results": results,
    "verdicts": verdicts,
    "evidence": evidence,
    "costs": costs,
    **{f"fields-{kind.__name__}": fields(kind) for kind in DESCRIBED},
    "zoo": zoo,
    "demo": demo,
    "rejecting": selective,
    "scores": table_of("rejecting.txt", "| method | score"),
    "temperature": table_of("rejecting.txt", "| method | temperature"),
    "tuning": whole("tuning-digits.txt"),
    "postgres": whole("postgres.txt"),
    "slurm": whole("slurm.txt"),
    "shared-gpu": shared_gpu,
    "faults": faults,
    "export": whole("export-check.txt"),
    "onnx-speed": whole("onnx-speed.txt"),
    "fine-tuning": fine_tuning,
    "flights": hypotheses,
    "defaults": whole("defaults.txt"),
    "newcomer": whole("newcomer.txt"),
    "tables": whole("tables.txt"),
    "icoseg": icoseg,
    "icoseg-search": icoseg_search,
    "small-cnn": small_cnn,
    "modern": modern_results,
    "modern-cpu": modern_cpu,
    "at-test": at_test,
    "at-test-held-out": held_out,
    "long-run": long_run,
    "trained-again": trained_again,
    "sharing-seeds": sharing_seeds,
    "svhn-whitened": svhn_whitened,
    "sharing-variants": sharing_variants,
    "adversarial": adversarial,
    "masks": masks,
    "mesh": meshes,
    "peers-mlp": whole("bench/peers-mlp-cpu.txt"),
    "peers-cnn": whole("bench/peers-cnn-cpu.txt"),
    "peers-gpu": whole("bench/peers-h200.txt"),
    "peers-start": whole("bench/start-cpu.txt"),
    "engine": table_of("engine-benchmark-h200.txt", "| row | members | ms/step"),
    "sizes": whole("bench/sizes-cpu.txt"),
    "mesh-killed": table_of("mesh.txt", "| case | mesh | killed"),
    "mesh-calculation": whole("mesh-calculation.txt"),
}


def widened(svg: str) -> str:
    """The picture with a margin at the left, for browsers whose font is wider than the one that set it."""
    size = re.search(r'<svg[^>]* width="([\d.]+)" height="([\d.]+)" viewBox="0 0 [\d. ]+"', svg)
    assert size, "vl-convert writes the size like this"
    width, height = float(size[1]) + MARGIN, float(size[2])
    wide = f'<svg width="{width:g}" height="{height:g}" viewBox="-{MARGIN} 0 {width:g} {height:g}"'
    svg = svg.replace(size[0], size[0][: size[0].index(" width=")] + wide.removeprefix("<svg"), 1)
    return svg.replace(f'<rect width="{size[1]}"', f'<rect x="-{MARGIN}" width="{width:g}"', 1)


def main() -> None:
    """Draw and fill all."""
    for name, make in FIGURES.items():
        if figure := make():
            path = figures.save(figure, PICTURES / f"{name}.svg")
            svg = widened(path.read_text(encoding="utf-8").rstrip())
            path.write_text(f"{svg}\n<!-- docs/make.py, {digest(figure)} -->\n", encoding="utf-8")
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        page.write_text(fill(text, "make", TABLES, page.name), encoding="utf-8")


if __name__ == "__main__":
    main()
