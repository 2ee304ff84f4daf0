"""The engine on a real GPU: captured, compiled and eager steps agree; a run resumes, falls back and diverges.

Two trainings of the same start are compared by the distance between their weights, as a share of the way that
was trained. float32 in another order of summation differs in the 7th digit, and 20 steps of a deep network
amplify that: with lr 1e-5 a change of the memory layout alone puts GoogLeNet-18 apart by 2 % of the way (with
lr 1e-3 by half of it), other draws of masks and labels by 130 %. So float32, TF32 off, is held to 10 %, and
float64 to a millionth.

M members, B batch, C classes, S samples.
"""

import itertools
import signal
import warnings
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from cmcl import Ensemble, Options, Recipe, fit
from cmcl.networks import NETWORKS, resnet20
from cmcl.training import Diverged, Interrupted
from cmcl.training.batches import Resident
from cmcl.training.checkpoint import Checkpoints
from cmcl.training.cuda import Captured
from cmcl.training.optim import set_lr
from cmcl.training.step import Step, TrainState
from helpers import only_our_warnings

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

M, B, N, STEPS = 3, 16, 64, 20
CLOSE, CLOSE64 = 0.1, 1e-6  # shares of the way, in float32 and float64
RECIPE = Recipe(
    members=M,
    overlap=2,
    labels="sampled",
    steps=STEPS,
    batch_size=B,
    lr=1e-5,
    weight_decay=1e-4,
    nesterov=True,
)
OPTIONS = {
    "cnn": dict(filters=(16, 32), hidden=32, dropout=0.0)
}  # chance that cannot be handed in is left out


@pytest.fixture(autouse=True)
def exact_arithmetic():
    """float32 is float32, and convolutions take the same algorithm each time, one that sums in one order."""
    cudnn = torch.backends.cudnn
    before = cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic
    torch.set_float32_matmul_precision("highest")
    cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic = False, False, True
    yield
    cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic = before
    torch.compiler.reset()


def examples(name="resnet20", n=N):
    generator = torch.Generator().manual_seed(7)
    dense = name == "fcn"
    images = torch.randn(n, 3, 32, 32, generator=generator)
    targets = torch.randint(2 if dense else 10, (n, 32, 32) if dense else (n,), generator=generator)
    return images, targets


def build(name="resnet20", seed=0, *, share=True, members=M, dtype=torch.float32, **options):
    torch.manual_seed(seed)
    options = OPTIONS.get(name, {}) | options
    ensemble = Ensemble(lambda: NETWORKS[name](**options), members, share_after="stem" if share else None)
    return ensemble.to("cuda", dtype).to(memory_format=torch.channels_last).train()


def learned(ensemble):
    return {name: p.detach().clone().double() for name, p in ensemble.named_parameters()}


def distance(ours, theirs, start):
    """How far two results lie apart, as a share of the way from the start to one of them."""
    apart = sum((ours[key] - theirs[key]).square().sum() for key in start)
    way = sum((theirs[key] - start[key]).square().sum() for key in start)
    return (apart / way).sqrt().item()


class Draws:
    """Masks and labels for every step, at one place in memory: compiled and captured code read them there."""

    def __init__(self, ensemble, images, targets, classes):
        with torch.no_grad():
            h = ensemble.members[0].stem(images[:B])
        h = h[0] if isinstance(h, tuple) else h
        self.masks = torch.zeros(M, M, *h.shape, dtype=torch.bool, device="cuda")
        self.labels = torch.zeros(1, M, B, *targets.shape[1:], dtype=torch.long, device="cuda")
        self.classes = classes

    def draw(self, number):
        generator = torch.Generator("cuda").manual_seed(number)
        self.masks.copy_(torch.rand(self.masks.shape, device="cuda", generator=generator) < 0.7)
        labels = torch.randint(self.classes, self.labels.shape, device="cuda", generator=generator)
        self.labels.copy_(labels)


def train(ensemble, data, recipe, *, compile=False, capture=False, given=False, steps=STEPS):
    """20 steps as the loop takes them, on masks and labels that are handed in, or drawn by the step."""
    images, targets = (tensor.cuda() for tensor in data)
    images = images.to(next(ensemble.parameters()).dtype)
    source = Resident(images, targets, recipe.batch_size, 0, torch.device("cuda"))
    classes = 10 if targets.ndim == 1 else 1
    state = TrainState(ensemble, recipe, 0, classes, STEPS)
    objective, draws = recipe.objective | {"ignore_index": 255 if targets.ndim > 1 else None}, None
    if given:
        draws = Draws(ensemble, images, targets, 10 if targets.ndim == 1 else 2)
        ensemble.share = partial(ensemble.share, masks=draws.masks)
        objective = objective | {"labels": draws.labels}
        draws.draw(0)
    step = Step(state, source, objective=objective, compile=compile, streams=capture)
    torch.cuda.manual_seed(1)
    set_lr(state.optimizer, recipe.lr)
    source.seek(0, 0)
    call = Captured(step) if capture else step
    for epoch in range(steps):
        for number in source.steps(epoch):
            if number == source.steps(epoch).start and number < steps:
                source.seek(epoch, number)
            if number < steps:
                set_lr(state.optimizer, recipe.lr_at(number, STEPS))
                if draws:
                    draws.draw(number)
                call()
    torch.cuda.synchronize()
    return SimpleNamespace(weights=learned(ensemble), state=state)


@pytest.mark.parametrize("name", NETWORKS)
def test_captured_compiled_and_eager_steps_agree(name):
    """Sharing and stochastic labels on the same draws; no fallback for the networks that we ship."""
    torch.compiler.reset()
    start = learned(build(name))

    def weights(**how):
        return train(build(name), examples(name), RECIPE, given=True, **how).weights

    with only_our_warnings():
        eager = weights()
        again = distance(weights(), eager, start)
        compiled = distance(weights(compile=True), eager, start)
        captured = distance(weights(compile=True, capture=True), eager, start)
        uncompiled = distance(weights(capture=True), eager, start)
    print(  # noqa: T201  (how close, for those who run it with -s)
        f"{name}: eager again {again:.1e}, compiled {compiled:.1e}, captured {captured:.1e}, "
        f"captured, not compiled {uncompiled:.1e} of the way"
    )
    assert max(compiled, captured, uncompiled) < CLOSE


@pytest.mark.parametrize("name", ["googlenet18", "resnet20"])
def test_compiled_and_eager_steps_agree_in_float64(name):
    """Where float32 cannot tell rounding from a mistake: the deepest network, and the one most used."""
    torch.compiler.reset()

    def weights(**how):
        ensemble = build(name, dtype=torch.float64)
        return train(ensemble, examples(name), RECIPE, given=True, steps=5, **how).weights

    with only_our_warnings():
        apart = distance(weights(compile=True), weights(), learned(build(name, dtype=torch.float64)))
    print(f"{name}: {apart:.1e} of the way")  # noqa: T201
    assert apart < CLOSE64


@pytest.mark.parametrize(
    "changes",
    [
        dict(augment={"flip": "alternating", "crop": 4, "cutout": 8, "jitter": 0.1}, ema=0.2),
        dict(augment={"flip": True, "mixup": 0.4, "cutmix": 1.0}, label_smoothing=0.1),
        dict(schedule="linear", warmup=0.3, evolve=0.8, overlap=1),
        dict(rule="annealed", overlap=1, temperature=2.0),
        dict(rule="relaxed", epsilon=0.1),
    ],
    ids=["augment-ema", "mix", "one-cycle-evolving", "annealed", "relaxed"],
)
def test_fit_captures_augmentation_averages_and_schedules(changes):
    """What changes during the run reaches the replayed graph: captured and eager runs end alike."""
    start = learned(build())
    recipe = replace(RECIPE, **changes)

    def weights(**how):
        ensemble = build()
        with only_our_warnings():
            fit(ensemble, examples(), recipe=recipe, options=Options(quiet=True, precision="float32", **how))
        return learned(ensemble)

    eager = weights(compile=False, capture=False)
    assert distance(weights(compile=False, capture=True), eager, start) < CLOSE
    weights()  # compiled: other draws, no fallback


@pytest.mark.parametrize("name", NETWORKS)
def test_captured_and_eager_steps_draw_the_same(name):
    """Masks, labels and dropout from the CUDA generator, in the same order with and without a graph."""
    options = dict(dropout=0.5) if name == "cnn" else {}
    for dtype, close in ((torch.float64, CLOSE64), (torch.float32, CLOSE)):

        def run(dtype=dtype, **how):
            return train(build(name, dtype=dtype, **options), examples(name), RECIPE, **how).weights

        start = learned(build(name, dtype=dtype, **options))
        apart = distance(run(capture=True), run(), start)
        print(f"{name}, {dtype}: {apart:.1e} of the way")  # noqa: T201
        assert apart < close


@pytest.mark.parametrize("how", [{}, {"compile": False}, {"compile": False, "capture": False}], ids=str)
def test_stacked_members_train_as_members_in_turn(how):
    """Without random draws, in a graph or not."""
    x = torch.randn(N, 6, generator=torch.Generator().manual_seed(0))
    recipe = replace(RECIPE, labels="exact", sharing=False, lr=0.01)

    def run(members, **options):
        torch.manual_seed(0)
        ensemble = Ensemble(lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)), M)
        start = learned(ensemble)
        settings = Options(quiet=True, precision="float32", members=members, device="cuda", **options)
        with only_our_warnings():
            fit(ensemble, (x, x[:, :4].argmax(1)), recipe=recipe, options=settings)
        return start, {name: value.cpu() for name, value in learned(ensemble).items()}

    (start, ours), (_, theirs) = run("stacked", **how), run("sequential", compile=False, capture=False)
    assert distance(ours, theirs, start) < 1e-3


def test_other_draws_would_be_noticed():
    """The yardstick: what the tolerance is compared with."""
    start = learned(build())
    ours = train(build(), examples(), RECIPE).weights
    theirs = train(build(), examples(), RECIPE, given=True).weights
    assert distance(ours, theirs, start) > 5 * CLOSE


def test_every_replay_draws_anew_and_as_often_as_said():
    """Compiled draws are others than eager ones, but no two steps share them, and rates are right."""
    torch.compiler.reset()

    class Look(nn.Module):
        """Features are ones, so that what arrives at the trunk counts the masks."""

        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.randn(1))
            self.register_buffer("seen", torch.zeros(B, 400))

        def stem(self, x):
            return torch.ones_like(x) + 0 * self.scale

        def trunk(self, h):
            self.seen.copy_(h.detach())
            return h[:, :10] * self.scale

    ensemble = Ensemble(Look, 2, share_after="stem").cuda().train()
    images, targets = torch.zeros(N, 400, device="cuda"), torch.zeros(N, dtype=torch.long, device="cuda")
    recipe = Recipe(members=2, steps=STEPS, batch_size=B, lr=1e-6, labels="sampled")
    source = Resident(images, targets, B, 0, torch.device("cuda"))
    state = TrainState(ensemble, recipe, 0, 10, STEPS)
    step = Step(state, source, objective=recipe.objective, compile=True, streams=True)
    # the statistics of a step that broke are put back, and so `seen` is only what a good step leaves
    source.seek(0, 0)
    with only_our_warnings():
        captured = Captured(step)
    seen = []
    for _ in range(4):
        captured()
        seen += [member.seen.clone() for member in ensemble.members]
    assert all(not a.equal(b) for a, b in itertools.combinations(seen, 2))
    rate = torch.stack(seen).mean().item() - 1  # h_m + mask * h_n
    assert abs(rate - 0.7) < 0.01  # 8 x 6,400 draws: deviation 0.002


def test_the_captured_loop_never_waits_for_the_device():
    ensemble = build()
    images, targets = (tensor.cuda() for tensor in examples())
    source = Resident(images, targets, B, 0, torch.device("cuda"))
    state = TrainState(ensemble, RECIPE, 0, 10, STEPS)
    step = Step(state, source, objective=RECIPE.objective, streams=True)
    source.seek(0, 0)
    captured = Captured(step)
    torch.cuda.synchronize()
    with warnings.catch_warnings(action="ignore"):  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        for number in range(4):
            set_lr(state.optimizer, 0.1 / (number + 1))
            captured()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert state.monitor.row()["loss"] > 0


class TestAdversarial:
    """In float64: a sign jumps at 0, so rounding in float32 moves some pixels by the whole step."""

    @pytest.mark.parametrize("compile", [False, True])
    def test_captured_as_eager(self, compile):
        torch.compiler.reset()
        recipe = Recipe(method="ie", members=M, steps=STEPS, batch_size=B, lr=1e-5, adversarial=0.05)

        def weights(recipe, **how):
            return train(build(share=False, dtype=torch.float64), examples(), recipe, **how).weights

        start = learned(build(share=False, dtype=torch.float64))
        eager, clean = weights(recipe), weights(replace(recipe, adversarial=0.0))
        with only_our_warnings():
            captured = weights(recipe, capture=True, compile=compile)
        apart = distance(captured, eager, start)
        print(f"compile={compile}: {apart:.1e} of the way")  # noqa: T201
        assert apart < CLOSE64
        assert distance(clean, eager, start) > 0.2

    def test_by_fit(self):
        recipe = Recipe(method="ie", members=2, steps=6, batch_size=B, lr=1e-5, adversarial=0.05)
        ensemble = build(share=False, members=2)
        with only_our_warnings():
            result = fit(ensemble, examples(), recipe=recipe, options=Options(quiet=True))
        assert result.steps == 6


class NeedsTheHost(nn.Module):
    """Looks at a value on the CPU, which no graph can hold."""

    def __init__(self):
        super().__init__()
        self.front = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
        self.head = nn.Linear(4, 10)

    def stem(self, x):
        return self.front(x)

    def trunk(self, h):
        features = h.mean((2, 3))
        return self.head(features if features.sum().item() < 1e9 else -features)

    def forward(self, x):
        return self.trunk(self.stem(x))


class TestFallback:
    @pytest.mark.parametrize("compile", [False, True])
    def test_one_warning_and_the_same_result(self, compile):
        torch.compiler.reset()

        def run(capture):
            torch.manual_seed(0)
            ensemble = Ensemble(NeedsTheHost, M, share_after="stem")
            options = Options(quiet=True, precision="float32", compile=compile, capture=capture)
            fit(ensemble, examples(), recipe=RECIPE, seed=3, options=options)
            return learned(ensemble)

        torch.manual_seed(0)
        start = learned(Ensemble(NeedsTheHost, M, share_after="stem").cuda())
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            ours = run(None)
        ours_only = [str(w.message) for w in seen if "slower" in str(w.message)]
        assert len(ours_only) == 1
        assert ours_only[0].startswith("the step runs without a CUDA graph, and slower: ")
        assert "captur" in ours_only[0]
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
        assert torch.rand(3, device="cuda").numel() == 3  # the generator still works
        with only_our_warnings():
            theirs = run(False)
        assert distance(ours, theirs, start) < CLOSE

    def test_a_loader_runs_uncaptured_without_a_word(self):
        data = torch.utils.data.TensorDataset(*examples())
        loader = torch.utils.data.DataLoader(data, batch_size=B, shuffle=True)
        with only_our_warnings():
            result = fit(build(), loader, recipe=RECIPE, options=Options(quiet=True, compile=False))
        assert result.steps == STEPS
        with pytest.raises(TypeError, match="train must be tensors for a captured step. Got a DataLoader"):
            fit(build(), loader, recipe=RECIPE, options=Options(quiet=True, capture=True))


class TestFit:
    def test_by_default_it_learns(self):
        """bf16, compiled, captured: an easy problem is learned, and a row says how."""
        images, targets = examples(n=256)
        images[torch.arange(256), 0, targets, :] += 3.0  # a bright line whose height is the class
        recipe = Recipe(
            members=M, overlap=2, labels="sampled", sharing=True, epochs=20, batch_size=32, lr=0.05
        )
        ensemble = build()
        with only_our_warnings():
            result = fit(
                ensemble,
                (images, targets),
                recipe=recipe,
                test=(images, targets),
                options=Options(quiet=True),
            )
        first, last = result.rows[0], result.rows[-1]
        assert last["loss"] < first["loss"]
        assert result.scores["top1"] < 20
        assert sum(last["specialist_fraction"]) == pytest.approx(2)
        assert next(ensemble.parameters()).dtype == torch.float32
        assert last["images_per_second"] > 0

    @pytest.mark.parametrize("name", ["cnn", "vggnet17", "googlenet18", "fcn"])
    def test_by_default_none_of_ours_falls_back(self, name):
        """bf16, compiled, captured, with a warm start, clipping and pieces of batches: a warning is a failure."""
        ensemble, recipe = (
            build(name),
            replace(RECIPE, steps=None, epochs=3, warm_start=1, clip_norm=1.0, accumulate=2),
        )
        with only_our_warnings():
            result = fit(ensemble, examples(name), recipe=recipe, options=Options(quiet=True))
        assert len(result.rows) == 3
        assert all(parameter.isfinite().all() for parameter in ensemble.parameters())

    def test_nothing_global_is_left_changed(self):
        before = torch.cuda.get_rng_state(), torch.backends.cudnn.benchmark
        with only_our_warnings():
            fit(build(), examples(), recipe=RECIPE, options=Options(quiet=True, compile=False))
        assert torch.cuda.get_rng_state().equal(before[0])
        assert torch.backends.cudnn.benchmark == before[1]
        assert not torch.are_deterministic_algorithms_enabled()

    def test_too_little_memory(self):
        """The message says what to lower."""
        ensemble = build()
        images = torch.zeros(1, 1, 1, 1).expand(N, 3, 32, 32)
        huge = Recipe(members=M, steps=1, batch_size=2**30, lr=0.1)
        free = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, 200e6 / free))
        torch.cuda.empty_cache()
        try:
            with only_our_warnings(), pytest.raises(torch.OutOfMemoryError, match="Lower batch_size"):
                fit(
                    ensemble,
                    (images.repeat(64, 1, 1, 1), torch.zeros(64 * N, dtype=torch.long)),
                    recipe=huge,
                    options=Options(quiet=True, compile=False),
                )
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)


@contextmanager
def interrupted_at(monkeypatch, number):
    """SIGINT before the so many-th step."""
    epoch, count = Resident.epoch, itertools.count()

    def interrupted(self, *arguments):
        for size in epoch(self, *arguments):
            if next(count) == number:
                signal.raise_signal(signal.SIGINT)
            yield size

    with monkeypatch.context() as patch:
        patch.setattr(Resident, "epoch", interrupted)
        yield


class TestResume:
    @pytest.mark.parametrize(("name", "number"), [("resnet20", 5), ("resnet20", 7), ("cnn", 6)])
    def test_equal_weights_where_determinism_is_asked_for(self, name, number, tmp_path, monkeypatch):
        """4 steps an epoch: stopped after steps 6, 8 (the end of an epoch) and 7."""
        recipe = Recipe(members=M, overlap=2, labels="sampled", sharing=True, epochs=3, batch_size=B, lr=0.01)
        options = Options(quiet=True, deterministic=True)

        def run(out, **more):
            ensemble = build(name, dropout=0.5) if name == "cnn" else build(name)
            try:
                with only_our_warnings():
                    fit(ensemble, examples(), recipe=recipe, seed=2, out=out, options=options, **more)
            finally:
                run.ensemble = ensemble
            return ensemble.state_dict()

        whole = run(tmp_path / "whole")
        with (
            interrupted_at(monkeypatch, number),
            pytest.raises(Interrupted, match=f"at step {number + 1} of 12"),
        ):
            run(tmp_path / "parts")
        parts = run(tmp_path / "parts", resume=True)
        assert parts.keys() == whole.keys()
        for key in whole:
            assert parts[key].equal(whole[key]), key


class TestNaN:
    def test_the_loop_stops_with_the_last_good_state(self, tmp_path):
        """One poisoned image; the step that meets it is known from the order of the stream."""
        images, targets = examples()
        images[20] = torch.nan
        source = Resident(images, targets, B, 5, torch.device("cpu"))
        source.seek(0, 0)
        bad = next(n for n in source.steps(0) if source.current()[0].isnan().any() or source.advance())
        assert bad > 0, "choose another image"
        ensemble = build()
        options = Options(quiet=True, compile=False, checkpoint_seconds=0.0)
        recipe = Recipe(members=M, epochs=2, batch_size=B, lr=0.01)
        with pytest.warns(UserWarning, match="train images hold NaN"), pytest.raises(Diverged) as error:
            fit(ensemble, (images, targets), recipe=recipe, seed=5, out=tmp_path, options=options)
        said = "the loss of member [0, 1, 2], or its gradient, is NaN or infinite at step"
        assert f"{said} {bad}, with lr 0.01" in str(error.value)
        kept = Checkpoints(tmp_path / "checkpoints").latest()
        assert kept.facts.step == bad
        for key, value in ensemble.state_dict().items():
            assert value.isfinite().all()
            assert value.cpu().equal(kept.tensors[f"ensemble.{key}"])


def test_memory_of_a_captured_run_is_bounded():
    """Neither a second capture (after a warm start) nor more runs need much more than one graph."""
    recipe = Recipe(members=M, epochs=4, batch_size=B, lr=0.01)
    options = Options(quiet=True, compile=False)

    def peak(recipe):
        torch.cuda.reset_peak_memory_stats()
        fit(build(), examples(), recipe=recipe, options=options)
        return torch.cuda.max_memory_allocated()

    peak(recipe)  # what stays loaded
    one = peak(recipe)
    two = [peak(replace(recipe, warm_start=2)) for _ in range(4)]
    assert max(two) <= 1.3 * one


def test_the_same_network_on_cpu_and_gpu():
    """An epoch of an independent ensemble, which draws nothing: the devices agree."""
    recipe = Recipe(method="ie", members=M, steps=4, batch_size=B, lr=1e-5)
    results = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        ensemble = Ensemble(resnet20, M)
        options = Options(device=device, precision="float32", compile=False, quiet=True)
        fit(ensemble, examples(), recipe=recipe, options=options)
        results.append({name: p.detach().cpu().double() for name, p in ensemble.named_parameters()})
    torch.manual_seed(0)
    start = {name: p.detach().double() for name, p in Ensemble(resnet20, M).named_parameters()}
    assert distance(*results, start) < CLOSE
