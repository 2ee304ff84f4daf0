"""Which runs of one's own the report compares, which have a mean, and that none is lost."""

import json
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cmcl
from cmcl.report.comparing import of_runs, repeats
from cmcl.reproduction.own import described
from cmcl.reproduction.record import Record
from own_runs import network, recorded, small
from report_samples import changed


def top1(record):
    return record.errors["expected"]["top1"]


def report(sources, folder):
    return cmcl.report.write(sources, folder / "report.md", format="md").read_text()


def test_unlike_networks_are_not_compared(tmp_path):
    tiny = recorded(tmp_path / "tiny", small, "ie")
    conv = recorded(tmp_path / "conv", network, "cmcl")
    assert tiny.network == {"class": "Sequential", "parameters": 650, "digest": tiny.network["digest"]}
    first, second = [told for told in of_runs([tiny, conv]) if " errs on " in told]
    assert first.startswith(
        "On own data with 3 Sequential of 650 parameters (2 steps), an independent ensemble"
    )
    assert second.startswith("On own data with 3 Sequential of 1,490 parameters (2 steps), CMCL errs")
    assert " errors" not in first + second
    assert Record.load(tmp_path / "tiny" / "record.json") == tiny


def test_unlike_tasks_are_not_compared(tmp_path):
    smoothed = partial(F.cross_entropy, label_smoothing=0.1, reduction="none")

    def smooth(logits, targets):
        return smoothed(logits, targets)

    runs = [recorded(tmp_path / f"plain{seed}", small, "cmcl", seed=seed) for seed in (0, 1)]
    runs += [recorded(tmp_path / f"own{seed}", small, "cmcl", seed=seed, task=smooth) for seed in (0, 1)]
    assert [run.task for run in runs] == [
        None,
        None,
        *["test_unlike_tasks_are_not_compared.<locals>.smooth"] * 2,
    ]
    told = [text for text in of_runs(runs) if " errs on " in text]
    assert len(told) == 2
    assert all("(n = 2)" in text for text in told), "and not 4"
    assert "task test_unlike_tasks" in told[1]
    assert Record.load(tmp_path / "own1" / "record.json") == runs[3]
    of_partial = recorded(tmp_path / "part", small, "ie", task=smoothed).task
    assert of_partial == "cross_entropy {'label_smoothing': 0.1, 'reduction': 'none'}"


def test_runs_that_trained_on_other_examples_have_no_mean(tmp_path):
    whole = recorded(tmp_path / "whole", small, "ie")
    again = recorded(tmp_path / "again", small, "ie", seed=1)
    part = recorded(tmp_path / "part", small, "ie", images=60, seed=2)
    assert whole.trained_on == again.trained_on != part.trained_on
    told = [text for text in of_runs([whole, again, part]) if " errs on " in text]
    assert ["(n = 2)" in text for text in told] == [True, False]
    assert not any("(n = 3)" in text for text in told)


def test_runs_in_folders_of_one_name_are_all_there(tmp_path):
    """Such as few/ie and many/ie, of one recipe and one seed."""
    runs = {
        images: recorded(tmp_path / str(images) / "ie", small, "ie", images=images) for images in (60, 600)
    }
    assert runs[60].file_name == runs[600].file_name
    sources = [tmp_path / "60", tmp_path / "600"]
    page = report(sources, tmp_path)
    for images, made in runs.items():
        assert f"| {images}/ie | {top1(made):.2f} |" in page
    assert "On own data with 3 Sequential of 650 parameters (2 steps) as in 60/ie, an indep" in page
    assert ": mean" not in page
    twice = report([sources[0], sources[0]], tmp_path)
    assert twice.count(f"| {top1(runs[60]):.2f} |") == 1, "the same one once"


def loop(folder, seed, **result):
    """A loop of one's own, and what it leaves; weights from a seed that nobody is told."""
    test = cmcl.data.load("digits", split="test")
    torch.manual_seed(seed)
    ensemble, recipe = cmcl.Ensemble(small, 3), cmcl.Recipe(members=3, steps=2, method="ie")
    pair = test.images / 255, test.targets
    return cmcl.record(folder, ensemble, pair, recipe=recipe, result=cmcl.Result(steps=2, **result))


def test_loops_that_say_little_are_all_there_and_make_no_mean(tmp_path):
    """The same name, the same seed, no time taken: only the weights tell them apart."""
    runs = [loop(tmp_path / place / "ie", seed, seconds=0) for seed, place in enumerate(("few", "many"))]
    assert runs[0].identity != runs[1].identity
    page = report([tmp_path / "few", tmp_path / "many"], tmp_path)
    assert f"| few/ie | {top1(runs[0]):.2f} |" in page
    assert f"| many/ie | {top1(runs[1]):.2f} |" in page
    assert "mean" not in page.split("Top-1: the")[0]
    same = [changed(run, name="ie") for run in runs]
    assert [len(group) for group in repeats(same)] == [1, 1], "one seed twice is no repeat"


def test_a_run_that_was_measured_again_elsewhere_is_one_run(tmp_path):
    made = recorded(tmp_path / "a" / "ie", small, "ie")
    changed(made, device="another", commit="later").save(tmp_path / "b" / "ie" / "record.json")
    page = report([tmp_path / "a", tmp_path / "b"], tmp_path)
    assert page.count(f"| {top1(made):.2f} |") == 1
    assert "(n = 2)" not in page
    assert made.weights
    for other in (
        {"weights": "f" * 64},
        {"checksums": {"test": "0"}},
        {"test_examples": 7},
        {"recipe_hash": "0"},  # the same training, tested in another way
        {"network": made.network | {"digest": "0"}},
        {"task": "smooth"},
    ):
        assert changed(made, **other).identity != made.identity, other
    assert changed(made, ood="svhn", validation=made.errors["sampled"]).identity == made.identity
    old = changed(made, weights=None)
    assert changed(old, seconds=old.seconds + 1).identity != old.identity


def test_batches_of_a_loader_may_differ(tmp_path):
    """As learning rates may."""
    train, test = (cmcl.data.load("digits", split=split) for split in ("train", "test"))
    runs = []
    for method, batch in (("cmcl", 16), ("ie", 32)):
        torch.manual_seed(0)
        ensemble = cmcl.Ensemble(small, 2)
        loader = DataLoader(TensorDataset(train.images[:64] / 255, train.targets[:64]), batch)
        recipe = cmcl.Recipe(method=method, members=2, steps=2)
        result = cmcl.fit(ensemble, loader, recipe=recipe, options=cmcl.Options(quiet=True))
        pair = test.images / 255, test.targets
        runs.append(cmcl.record(tmp_path / method, ensemble, pair, recipe=recipe, result=result))
    assert runs[0].trained_on == runs[1].trained_on == "a DataLoader of 64 examples"
    assert ", an independent ensemble (IE) on " in of_runs(runs)[0]


def test_what_fit_trained_is_compared_with_what_a_loop_trained(tmp_path):
    fitted = recorded(tmp_path / "cmcl", small, "cmcl")
    own = changed(loop(tmp_path / "ie", 0, seconds=1), checksums=fitted.checksums)
    assert own.trained_on is None is not fitted.trained_on
    assert ", an independent ensemble (IE) on " in of_runs([fitted, own])[0]
    other = changed(fitted, trained_on="7 examples", name="other", weights="f" * 64)
    assert not any("independent ensemble (IE) on " in told for told in of_runs([fitted, other, own]))


def test_like_networks_are_compared(tmp_path):
    """Cut or whole, one alone or several."""
    cmcl_, ie, one = (
        recorded(tmp_path / "cmcl", network, "cmcl", share_after="1"),
        recorded(tmp_path / "ie", network, "ie"),
        recorded(tmp_path / "one", network, "ie", members=1),
    )
    assert cmcl_.network == ie.network == one.network
    assert ", an independent ensemble (IE) on " in of_runs([cmcl_, ie, one])[0]
    other = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(144, 10))
    assert described(nn.ModuleList([other]))["digest"] != ie.network["digest"], "same shapes, other layers"
    low, high = (described(nn.ModuleList([nn.Dropout(p)]))["digest"] for p in (0.1, 0.9))
    assert low != high, "same layers, otherwise set"

    class Called(nn.Module):
        def __init__(self):
            super().__init__()
            self.f = lambda: None

        def extra_repr(self):
            return str(self.f)  # with its address

    one, other = Called(), Called()
    assert str(one) != str(other)
    assert described(nn.ModuleList([one])) == described(nn.ModuleList([other]))


def test_records_of_before_are_compared_among_themselves(tmp_path):
    cmcl_, ie = (recorded(tmp_path / method, network, method) for method in ("cmcl", "ie"))
    old = [changed(record, network=None) for record in (cmcl_, ie)]
    assert "independent ensemble" in of_runs(old)[0]
    assert len([told for told in of_runs([old[0], ie]) if " errs on " in told]) == 2
    text = json.loads((tmp_path / "ie" / "record.json").read_text())
    del text["network"]
    (tmp_path / "ie" / "record.json").write_text(json.dumps(text))
    assert Record.load(tmp_path / "ie" / "record.json") == old[1]
