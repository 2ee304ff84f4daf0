"""The loops of others: each example runs in small and learns, and what they rely on holds."""

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
