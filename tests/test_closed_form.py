"""The gradient in closed form, and steps counted together, are those of autograd, one by one."""

import json
import math
import signal

import pytest
import torch
from torch import nn

import cmcl
from cmcl import Options, Recipe, confident_oracle_loss
from cmcl.objectives import loss_and_gradient
from cmcl.training import Diverged, Interrupted, monitor
from cmcl.training.monitor import Monitor
from cmcl.training.step import Step

CPU = torch.device("cpu")
QUIET = Options(quiet=True, device="cpu")
RECIPE = Recipe(members=3, epochs=2, batch_size=4, lr=0.05)
N = 40  # 10 steps an epoch


def draw(members, batch, classes, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(members, batch, classes, generator=generator, dtype=dtype)
    return logits.requires_grad_(), torch.randint(classes, (batch,), generator=generator)


class TestGradient:
    def test_worked_out(self):
        """One example of class 0; P = (0.9, 0.1) of the specialist and (0.6, 0.4) of the other; beta = 1/2."""
        logits = torch.tensor([[[0.9, 0.1]], [[0.6, 0.4]]], dtype=torch.float64).log()
        loss, gradient = loss_and_gradient(logits, torch.tensor([0]), beta=0.5, overlap=1)
        assert loss.assignment.tolist() == [[True], [False]]
        kl = -math.log(2) - (math.log(0.6) + math.log(0.4)) / 2
        assert loss.total.item() == pytest.approx(-math.log(0.9) + kl / 2)
        assert gradient.flatten().tolist() == pytest.approx([-0.1, 0.1, 0.05, -0.05])

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("beta", [0.0, 0.25, 2.0])
    @pytest.mark.parametrize("overlap", [1, 3, 4, torch.tensor(2)])
    def test_equals_autograd(self, dtype, beta, overlap):
        logits, targets = draw(4, 7, 5, dtype)
        expected = confident_oracle_loss(logits, targets, beta=beta, overlap=overlap)
        expected.backward()
        loss, gradient = loss_and_gradient(logits, targets.to(torch.uint8), beta=beta, overlap=overlap)
        for ours, theirs in zip(loss, expected, strict=True):
            torch.testing.assert_close(ours, theirs.detach())
        torch.testing.assert_close(gradient, logits.grad)

    def test_a_class_that_is_masked_out(self):
        logits, targets = draw(2, 3, 4)
        logits = logits.detach().index_fill(2, torch.tensor([3]), -math.inf).requires_grad_()
        targets = targets.clamp(max=2)
        for beta, overlap in ((0.0, 1), (0.5, 2)):  # no one learns the infinite KL
            expected = confident_oracle_loss(logits, targets, beta=beta, overlap=overlap)
            loss, gradient = loss_and_gradient(logits, targets, beta=beta, overlap=overlap)
            assert loss.total == expected.total
            assert loss.total.isfinite()
            torch.testing.assert_close(gradient, torch.autograd.grad(expected.total, logits)[0])


class TestKept:
    def count(self, kept, *, limit, monkeypatch, beta=0.5, classes=5):
        monkeypatch.setattr(monitor, "KEPT", limit)
        own = Monitor(3, classes, 2, CPU)
        broken = []
        for step in range(8):
            logits, targets = draw(3, 7, 5, seed=step)
            loss = confident_oracle_loss(logits, targets, beta=beta, overlap=2)
            if kept:
                own.keep(detached(loss), logits, targets, beta=beta)
            else:
                own.count(loss, logits, targets, beta=beta)
            broken.append(own.count_step(torch.tensor(step + 0.1)).item())
        assert not any(broken)
        return own

    def test_few_logits_are_no_reason_to_keep_all_steps(self):
        own, (logits, targets) = Monitor(1, 2, 1, CPU), draw(1, 1, 2)
        loss = detached(confident_oracle_loss(logits, targets))
        for _ in range(600):
            own.keep(loss, logits, targets, beta=1.0)
            own.count_step(torch.tensor(1.0))
            assert len(own._kept) <= 256
        assert own.steps() == 600

    @pytest.mark.parametrize("limit", [0, 300, 10**6])  # each alone, by three, all of them
    @pytest.mark.parametrize(("beta", "classes"), [(0.5, 5), (0.0, 1)])
    def test_to_the_bit(self, limit, beta, classes, monkeypatch):
        how = {"beta": beta, "classes": classes, "monkeypatch": monkeypatch}
        ours, theirs = self.count(True, limit=limit, **how), self.count(False, limit=0, **how)
        assert ours.row() == theirs.row()
        for own, other in zip(ours.tensors(), theirs.tensors(), strict=True):
            assert own.equal(other)

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_a_loss_that_is_not_finite(self, value):
        own = Monitor(2, 3, 1, CPU)
        for step in range(5):
            logits, targets = draw(2, 4, 3, seed=step)
            loss = confident_oracle_loss(logits, targets, beta=1.0, overlap=1)
            if step == 3:
                task = loss.task.detach().clone()
                task[1] = value
                loss = loss._replace(task=task, total=torch.tensor(value))
                loss = loss._replace(assignment=torch.tensor([[False], [True]]).expand(2, 4))
            own.keep(detached(loss), logits, targets, beta=1.0)
            assert own.count_step(torch.tensor(1.0)) == (step >= 3)  # and so it stays
        assert own.diverged.tolist() == [math.inf, 3.0]
        assert own.steps() == 5

    def test_a_gradient_that_is_not_finite(self):
        own = Monitor(2, 3, 1, CPU)
        for norm in (1.0, 1.0, math.nan):
            logits, targets = draw(2, 4, 3)
            loss = detached(confident_oracle_loss(logits, targets, overlap=1))
            own.keep(loss, logits, targets, beta=1.0)
            broken = own.count_step(torch.tensor(norm))
        assert broken == 1
        assert own.diverged.tolist() == [2.0, 2.0]


def detached(loss):
    """As `loss_and_gradient` returns it: without gradients."""
    return type(loss)(*(tensor.detach() for tensor in loss))


def ensemble(seed=0):
    torch.manual_seed(seed)
    return cmcl.Ensemble(lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)), 3)


def data():
    x = torch.randn(N, 6, generator=torch.Generator().manual_seed(1))
    y = x[:, :4].argmax(1)
    return x, y


def run(own, *, recipe=RECIPE, options=QUIET, **how):
    rows = cmcl.fit(own, data(), recipe=recipe, seed=3, options=options, **how).rows
    for row in rows:
        del row["images_per_second"]
    return rows


def parameters(own):
    return torch.cat([p.detach().flatten() for p in own.parameters()])


class TestRun:
    @pytest.mark.parametrize("members", ["stacked", "sequential"])
    @pytest.mark.parametrize(
        "method", [{}, {"method": "ie"}, {"method": "mcl"}, {"evolve": 0.5}, {"clip_norm": 1.0, "ema": 0.2}]
    )
    def test_equals_autograd(self, members, method, monkeypatch):
        options = Options(quiet=True, device="cpu", members=members)
        found, used = [], []
        for closed in (True, False):
            own = ensemble()
            with monkeypatch.context() as patch:
                call = Step.__call__

                def step(self, closed=closed, call=call):
                    used.append(self.closed_form)
                    self.closed_form = closed
                    call(self)

                patch.setattr(Step, "__call__", step)
                rows = run(own, recipe=Recipe(**vars(RECIPE) | method), options=options)
            found.append((parameters(own), rows))
        assert all(used[:20])
        torch.testing.assert_close(found[0][0], found[1][0])
        for ours, theirs in zip(found[0][1], found[1][1], strict=True):
            assert ours.keys() == theirs.keys()
            for key, value in ours.items():
                torch.testing.assert_close(torch.tensor(value), torch.tensor(theirs[key]), msg=key)

    def test_only_of_what_it_knows(self, monkeypatch):
        seen, call = [], Step.__call__
        monkeypatch.setattr(Step, "__call__", lambda step: (seen.append(step.closed_form), call(step))[1])
        for other in ({"labels": "sampled"}, {"rule": "relaxed"}, {"accumulate": 2}, {"adversarial": 0.1}):
            run(ensemble(), recipe=Recipe(**vars(RECIPE) | other))
        assert len(seen) == 4 * 20
        assert not any(seen)

    def test_another_shape_in_train_mode(self):
        """The check before the run sees eval mode."""

        class Doubled(nn.Linear):
            def forward(self, x):
                return super().forward(x).repeat(1 + self.training, 1)

        with pytest.raises(ValueError, match=r"targets must have shape \(8,\)"):
            run(cmcl.Ensemble(lambda: Doubled(6, 4), 3))

    @pytest.mark.parametrize("number", [3, 9, 14])
    def test_resumed_amid_kept_steps(self, number, tmp_path, monkeypatch):
        whole = ensemble()
        rows = run(whole)
        call, done = Step.__call__, []

        def step(self):
            if len(done) == number:
                signal.raise_signal(signal.SIGINT)
            done.append(0)
            call(self)

        with monkeypatch.context() as patch:
            patch.setattr(Step, "__call__", step)
            with pytest.raises(Interrupted):
                run(ensemble(), out=tmp_path)
        resumed = ensemble(7)
        run(resumed, out=tmp_path, resume=True)
        assert parameters(resumed).equal(parameters(whole))
        told = [json.loads(line) for line in (tmp_path / "telemetry.jsonl").read_text().splitlines()]
        for row in told:
            del row["images_per_second"]
        assert told == rows

    def test_diverges_with_the_last_good_weights(self, tmp_path, monkeypatch):
        good, call, done = [], Step.__call__, []

        def step(self):
            if len(done) == 13:
                good.append(parameters(self.state.ensemble).clone())
                self.batches.images[:] = math.nan
            done.append(0)
            call(self)

        own = ensemble()
        monkeypatch.setattr(Step, "__call__", step)
        with pytest.raises(Diverged, match="at step 13"):
            run(own)
        assert parameters(own).equal(good[0])
