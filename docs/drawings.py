"""The pictures of these pages, drawn from files in results/ and zoo/; make.py writes them.

M members, C classes.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch
from PIL import Image

from cmcl.reproduction import find

ROOT = Path(__file__).parents[1]
REJECTING = ROOT / "results" / "rejecting.json"
TUNING = ROOT / "results" / "tuning-digits.json"
ICOSEG = sorted((ROOT / "results" / "records").glob("icoseg-fcn-m*-seed0.json"))
ANSWERS = ROOT / "results" / "icoseg-answers"
RECORDS = [ROOT / "zoo" / f"cifar10-resnet20-{method}" / "record.json" for method in ("ie", "cmcl")]
TABLE1 = {  # method -> its first seed's record, as far as there are any
    name.removeprefix("cifar10-cnn-"): path
    for name in (f"cifar10-cnn-{method}" for method in ("mcl", "cmcl", "ie", "ie-adversarial"))
    if (path := ROOT / "results" / "records" / f"{name}--{find(name).hash}--seed0.json").exists()
}
CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
BLUE, ORANGE, GREEN, GREY, INK = "#2f6fb0", "#d9630f", "#3a8f5c", "#c9ced4", "#1f2933"
COLOURS = {"ie": BLUE, "mcl": GREEN, "cmcl": ORANGE}
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": "#8a94a0",
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "legend.frameon": False,
    "svg.hashsalt": "cmcl",  # the same picture gives the same bytes
}


def sharing() -> Figure:
    """The paper's figure 2d: what two members pass to each other."""
    figure = Figure(figsize=(8.0, 3.9))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, 16), ylim=(0, 7.8), aspect="equal")
    axes.set_axis_off()
    masks = {0: (1, 0, 1, 1), 1: (0, 1, 1, 0)}  # what leaves each member; any draw will do
    heights, colours = (5.7, 1.9), (BLUE, GREEN)
    for m, (y, colour) in enumerate(zip(heights, colours, strict=True)):
        _arrow(axes, (0.65, 3.8), (1.35, y - 0.3 if m == 0 else y + 0.3), INK)
        _box(axes, 2.4, y, 1.9, f"stem {m + 1}", colour)
        _units(axes, 4.8, y, (1, 1, 1, 1), colour)
        _units(axes, 8.5, y, masks[m], colour)
        _box(axes, 12.0, y, 0.7, "+", INK)
        _box(axes, 14.1, y, 1.9, f"trunk {m + 1}", colour)
        for start, end in ((3.4, 4.45), (5.2, 8.1), (12.4, 13.1), (15.1, 15.9)):
            _arrow(axes, (start, y), (end, y), INK)
        _arrow(axes, (5.0, y + 1.25), (12.0, y + 0.42), colour, bend=-0.17)
        _arrow(axes, (8.9, y), (11.65, heights[1 - m]), colour)
        axes.text(4.8, y - 1.5, f"$h_{m + 1}$", ha="center", va="center", fontsize=12)
        axes.text(
            8.5,
            y - 1.5,
            rf"$\sigma_{{{m + 1}{2 - m}}} \star h_{m + 1}$",
            ha="center",
            va="center",
            fontsize=12,
        )
        axes.text(6.6, y + 0.2, "mask", ha="center", fontsize=9)
    axes.text(0.4, 3.8, "x", ha="center", va="center", fontsize=13, style="italic")
    axes.text(6.65, 7.5, "its own features, whole", ha="center", fontsize=9)
    axes.text(12.35, 3.8, "what the other lets through", ha="left", va="center", fontsize=9)
    return figure


def _box(axes: Axes, x: float, y: float, width: float, text: str, colour: str) -> None:
    style = "round,pad=0.02,rounding_size=0.18"
    box = FancyBboxPatch(
        (x - width / 2, y - 0.42), width, 0.84, boxstyle=style, fc="white", ec=colour, lw=1.8
    )
    axes.add_patch(box)
    axes.text(x, y, text, ha="center", va="center", fontsize=11)


def _units(axes: Axes, x: float, y: float, kept: tuple[int, ...], colour: str) -> None:
    for i, keep in enumerate(kept):
        face = colour if keep else "#e4e7ea"
        axes.add_patch(Circle((x, y + 0.9 - 0.6 * i), 0.24, fc=face, ec=colour if keep else GREY, lw=1.2))


def _arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str, bend: float = 0.0
) -> None:
    shape = f"arc3,rad={bend}"
    axes.add_patch(
        FancyArrowPatch(
            start, end, arrowstyle="-|>", mutation_scale=10, lw=1.3, color=colour, connectionstyle=shape
        )
    )


def who_knows_what() -> Figure:
    """The paper's figure 1, of the ensembles in zoo/."""
    return class_maps(dict(zip(("independent ensemble", "CMCL, K = 4 of 5"), RECORDS, strict=True)))


def figure1() -> Figure:
    """The paper's figure 1: small networks, K = 1."""
    titles = {"mcl": "MCL", "cmcl": "CMCL", "ie": "independent ensemble"}
    return class_maps({title: TABLE1[method] for method, title in titles.items() if method in TABLE1})


def class_maps(records: Mapping[str, Path]) -> Figure:
    """Each member's accuracy on each class; a panel for each title."""
    figure = Figure(figsize=(8.6, 3.0), layout="constrained")
    panels = np.atleast_1d(figure.subplots(1, len(records), sharey=True))
    for axes, (title, path) in zip(panels, records.items(), strict=True):
        values = np.array(json.loads(path.read_text())["classwise"])  # (M, C)
        axes.imshow(values, cmap="Blues", vmin=0, vmax=100, aspect="auto")
        for (m, c), value in np.ndenumerate(values):
            colour = "white" if value > 60 else INK
            axes.text(c, m, f"{value:.0f}", ha="center", va="center", color=colour, fontsize=8)
        axes.set_title(title)
        axes.set_xticks(range(10), CLASSES, rotation=40, ha="right", fontsize=9)
        axes.set_yticks(range(5), [f"member {m}" for m in range(5)], fontsize=9)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    return figure


def entropy() -> Figure:
    """The paper's figure 2a-c, of the ensembles in zoo/."""
    found = json.loads(REJECTING.read_text())
    titles = {"ie": "independent ensemble", "cmcl": "CMCL, K = 4 of 5"}
    return entropies(
        {
            title: {
                kind: np.sum([member[kind] for member in found[method]["members"]], axis=0)
                for kind in ("specialised", "other", "unseen")
            }
            for method, title in titles.items()
        }
    )


def figure2() -> Figure:
    """The paper's figure 2a-c: the members of MCL and CMCL, K = 1, and the averaged answer of IE."""
    members = {"specialised": "specialised", "other": "other", "ood": "unseen"}
    averaged = {"averaged": "known", "averaged_ood": "unseen"}
    titles = {"mcl": "MCL", "cmcl": "CMCL", "ie-adversarial": "IE, adversarial (averaged)"}
    panels = {}
    for method, title in titles.items():
        if method in TABLE1:
            found = json.loads(TABLE1[method].read_text())["entropy"]
            kinds = averaged if method.startswith("ie") else members
            panels[title] = {name: np.atleast_2d(found[kind]).sum(0) for kind, name in kinds.items()}
    return entropies(panels)


def entropies(panels: Mapping[str, Mapping[str, np.ndarray]]) -> Figure:
    """How sure the members are of what they know, do not know, and never saw; a panel for each title."""
    figure = Figure(figsize=(8.6, 3.4), layout="constrained")
    kinds = {
        "specialised": ("classes it masters (over 90 % right)", GREEN),
        "other": ("the other classes", BLUE),
        "known": ("CIFAR-10 test", INK),
        "unseen": ("SVHN, never seen", ORANGE),
    }
    all_axes = np.atleast_1d(figure.subplots(1, len(panels), sharex=True))
    for axes, (title, histograms) in zip(all_axes, panels.items(), strict=True):
        for kind, counts in histograms.items():
            label, colour = kinds[kind]
            _steps(axes, counts, colour, label)
        axes.set_title(title)
        axes.set_xlabel("entropy of an answer, nats")
    all_axes[0].set_ylabel("share of answers, %\n(log scale)")
    shown = {text: h for axes in all_axes for h, text in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(shown.values(), shown, fontsize=9, loc="outside lower center", ncols=4)
    return figure


def unseen() -> Figure:
    """Entropy of the averaged answer on data of the known kind and on another."""
    found = json.loads(REJECTING.read_text())
    figure = Figure(figsize=(8.6, 3.0), layout="constrained")
    panels = figure.subplots(1, 2, sharex=True)
    for axes, method, title in zip(panels, ("ie", "cmcl"), ("independent ensemble", "CMCL"), strict=True):
        scores = found[method]["ranking"]["mean_entropy"]
        _steps(axes, np.array(scores["known"]), GREEN, "CIFAR-10 test")
        _steps(axes, np.array(scores["unseen"]), ORANGE, "SVHN, never seen")
        axes.set_title(f"{title}: AUROC {scores['auroc']:.3f}")
        axes.set_xlabel("entropy of the averaged answer, nats")
    panels[0].set_ylabel("share of images, %\n(log scale)")
    panels[0].legend(fontsize=9, loc="upper right")
    return figure


def _steps(axes: Axes, counts: np.ndarray, colour: str, label: str) -> None:
    edges = np.linspace(0, np.log(10), len(counts) + 1)
    axes.stairs(100 * counts / counts.sum(), edges, color=colour, lw=1.6, label=label)
    axes.stairs(100 * counts / counts.sum(), edges, color=colour, alpha=0.12, fill=True)
    axes.set_yscale("symlog", linthresh=1)
    axes.set_yticks([0, 1, 10, 100], ["0", "1", "10", "100"])
    axes.set_ylim(0, 130)


def rejecting() -> Figure:
    """Error against coverage, and what was asked for against what came."""
    found = json.loads(REJECTING.read_text())
    figure = Figure(figsize=(8.6, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for method, name in (("ie", "independent ensemble"), ("cmcl", "CMCL")):
        colour = COLOURS[method]
        left.plot(
            range(1, 101), found[method]["risk_coverage"]["confidence"], color=colour, lw=1.8, label=name
        )
        rows = [row for row in found[method]["rejecting"] if row["tested_answered"]]
        asked = [100 * row["risk"] for row in rows]
        came = [100 * row["tested_wrong"] / row["tested_answered"] for row in rows]
        answered = [100 * row["tested_answered"] / row["tested"] for row in rows]
        left.plot(answered, came, "o", color=colour, ms=5)
        right.plot(asked, came, "o-", color=colour, lw=1.2, ms=5, label=name)
    left.set(xlabel="answered, %", ylabel="wrong among the answered, %", xlim=(0, 102), ylim=(0, None))
    left.set_title("less answered, fewer errors")
    left.legend(fontsize=9, loc="upper left")
    right.plot([0, 5.4], [0, 5.4], color="#8a94a0", lw=1, ls="--")
    right.text(4.2, 4.75, "as asked", ha="right", fontsize=9, color="#5f6b76")
    right.set(xlabel="risk asked for, %", ylabel="wrong among the answered, %", xlim=(0, 5.4), ylim=(0, 5.4))
    right.set_title("asked for, and what came")
    return figure


def segmentation() -> Figure:
    """The paper's figures 4b and 4c: errors against the number of members."""
    figure = Figure(figsize=(8.6, 3.2), layout="constrained")
    panels = figure.subplots(1, 3, sharex=True, sharey=True)
    kinds = (("picked", "most confident member"), ("top1", "averaged prediction"), ("oracle", "oracle"))
    for axes, (kind, label) in zip(panels, kinds, strict=True):
        for method, colour in COLOURS.items():
            errors = segmentation_errors(kind)
            points = sorted((m, error) for (m, name), error in errors.items() if name == method or m == 1)
            axes.plot(*zip(*points, strict=True), "o-", color=colour, lw=1.8, ms=5, label=method.upper())
        axes.set(title=label, xlabel="members", xticks=range(1, 6), ylim=(0, None))
    panels[0].set(ylabel="error, % of pixels")
    panels[0].legend(fontsize=9, loc="lower left")
    return figure


def segmentation_errors(kind: str) -> dict[tuple[int, str], float]:
    """By number of members and method; one member alone is the same for every method."""
    records = [json.loads(path.read_text()) for path in ICOSEG]
    return {
        (record["recipe"]["members"], record["recipe"]["method"]): record["errors"]["expected"][kind]
        for record in records
    }


def answers() -> Figure:
    """The paper's figure 3: what each member of a CMCL ensemble answers for some images."""
    items = json.loads((ANSWERS / "gallery.json").read_text())["items"]
    figure = Figure(figsize=(8.6, 3.9), layout="constrained")
    for row, item in zip(figure.subplots(len(items), 5), items, strict=True):
        for m, (axes, member) in enumerate(zip(row, item["members"], strict=True)):
            axes.imshow(
                np.asarray(Image.open(ANSWERS / member["mask"])), cmap="gray", interpolation="nearest"
            )
            picked = m == item["chosen"]
            axes.set_xticks([])
            axes.set_yticks([])
            axes.spines[:].set(visible=True, color=ORANGE if picked else GREY, linewidth=3 if picked else 1)
            axes.set_xlabel(f"entropy {member['entropy']:.2f}, {member['error']:.0f} % wrong", fontsize=8)
            if item is items[0]:
                axes.set_title(f"member {m}")
        row[0].set_ylabel(item["group"].split(" ", 1)[1].split("-")[0], fontsize=9)
    return figure


def tuning(path: Path) -> None:
    """The rounds of `cmcl tune`, drawn by itself."""
    from cmcl.reproduction.tuning import plot

    plot(json.loads(TUNING.read_text()), path)


def save(draw: Callable[[], Figure]) -> Callable[[Path], None]:
    """A figure of matplotlib as a file."""
    return lambda path: draw().savefig(path, metadata={"Date": None, "Creator": None})


def measured(*methods: str) -> list[Path]:
    """The records of Table 1 that there are."""
    return [TABLE1[method] for method in methods if method in TABLE1]


DRAWN: dict[str, tuple[Callable[[Path], None], list[Path]]] = {  # picture -> who draws it, and from what
    "sharing": (save(sharing), []),
    "figure1": (save(figure1), measured("mcl", "cmcl", "ie")),
    "figure2": (save(figure2), measured("mcl", "cmcl", "ie-adversarial")),
    "who-knows-what": (save(who_knows_what), RECORDS),
    "entropy": (save(entropy), [REJECTING]),
    "unseen": (save(unseen), [REJECTING]),
    "rejecting": (save(rejecting), [REJECTING]),
    "tuning": (tuning, [TUNING]),
    "segmentation": (save(segmentation), ICOSEG),
    "answers": (save(answers), sorted(ANSWERS.iterdir())),
}


def digest(name: str) -> str:
    """Of this program and of the files that a picture is drawn from."""
    parts = [Path(__file__), *DRAWN[name][1]]
    return hashlib.sha256(b"".join(path.read_bytes() for path in parts)).hexdigest()[:16]
