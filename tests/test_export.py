"""Exported files answer as the ensemble does."""

import json
import os
import sys
import zipfile
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import cmcl
from cmcl import Ensemble, load
from cmcl import export as exporting
from cmcl._files import DiskFullError
from cmcl.data import load as load_data
from cmcl.data.transforms import GCN, ZCA, Compose, MeanStd
from cmcl.export import ABOUT, OUTPUTS, TOLERANCE, export, onnx_runner

ONNX = all(find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime"))
needs_onnx = pytest.mark.skipif(not ONNX, reason="needs pip install 'confident-mcl[export]'")


def images(n, *shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n, *shape), dtype=torch.uint8, generator=generator)


def small_cnn(classes=10):
    sizes = {"channels": 1, "size": 8, "filters": (4, 4), "kernel": 3, "padding": 1, "hidden": None}
    return cmcl.networks.cnn(classes=classes, **sizes)


class Skip(nn.Module):
    """A value crosses the cut unmixed, batch normalisation and dropout depend on the mode."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.relu = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU()
        self.drop, self.last = nn.Dropout(0.5), nn.Linear(10, 3)

    def forward(self, x):
        return self.last(self.drop(torch.cat([self.relu(self.norm(self.first(x))), x], 1)))


def assert_equal(got, expected):
    for name, ours, theirs in zip(OUTPUTS, got, expected, strict=True):
        torch.testing.assert_close(
            ours, theirs, atol=TOLERANCE, rtol=0, msg=lambda m, name=name: f"{name}: {m}"
        )


def whitened():
    torch.manual_seed(0)
    ensemble = cmcl.Ensemble(small_cnn, 3, share_after="stem")
    ensemble.transform = Compose([GCN(), ZCA()]).fit(images(80, 1, 8, 8))
    ensemble.temperature = 0.5
    return ensemble


@pytest.mark.parametrize("format", [pytest.param("onnx", marks=needs_onnx), "torch"])
def test_whitening_sharing_and_choice_in_one_graph(format, tmp_path):
    """Raw images in, and a batch of 1 or more."""
    ensemble = whitened().train()
    before = {key: value.clone() for key, value in ensemble.state_dict().items()}
    path = tmp_path / "new" / f"model.{format}"
    done = export(ensemble, path, images(6, 1, 8, 8), format=format)
    assert done.path == path
    assert done.examples == 6
    assert done.input == "uint8 (batch, 1, 8, 8)"
    assert set(done.differences) == set(OUTPUTS)
    assert [file.name for file in path.parent.iterdir()] == [path.name], "one file, nothing left behind"

    run = onnx_runner(path) if format == "onnx" else torch_runner(path)
    for n in (1, 2, 17):
        assert_equal(run(images(n, 1, 8, 8, seed=n)), ensemble.predict(images(n, 1, 8, 8, seed=n)))
        assert run(images(n, 1, 8, 8))[0].numpy().shape == (n, 10), "no gradients"
    if format == "onnx":
        assert onnx_shapes(path) == {
            "input": ["batch", 1, 8, 8],
            "probs": ["batch", 10],
            "member_probs": [3, "batch", 10],
            "entropy": [3, "batch"],
            "chosen": ["batch"],
        }
    assert ensemble.training
    assert all(p.requires_grad for p in ensemble.parameters())
    assert all(torch.equal(value, before[key]) for key, value in ensemble.state_dict().items())
    assert ensemble.transform.transform(images(2, 1, 8, 8)).isfinite().all(), "its float64 copies are its own"


def torch_runner(path):
    module = torch.export.load(path).module()
    return lambda x: [module(x)[name] for name in OUTPUTS]


def onnx_shapes(path):
    import onnx

    graph = onnx.load(path).graph
    return {
        value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.output)
    }


def test_a_network_cut_by_name_on_floats(tmp_path):
    torch.manual_seed(1)
    ensemble = cmcl.Ensemble(Skip, 4, share_after="relu", share_at_test="sampled")
    ensemble(torch.randn(50, 4))  # batch statistics that differ from 0 and 1
    export(ensemble, tmp_path / "m.pt2", torch.randn(5, 4), format="torch")
    assert ensemble.share_at_test == "sampled"
    ensemble.share_at_test = "expected"
    x = torch.randn(9, 4)
    assert_equal(torch_runner(tmp_path / "m.pt2")(x), ensemble.predict(x))
    ensemble.share_at_test = "off"
    export(ensemble, tmp_path / "m.pt2", x, format="torch")
    assert_equal(torch_runner(tmp_path / "m.pt2")(x), ensemble.predict(x))


def test_dense_outputs(tmp_path):
    torch.manual_seed(0)
    ensemble = cmcl.Ensemble(lambda: cmcl.networks.fcn(filters=(4, 8)), 2, share_after="stem")
    ensemble.transform = MeanStd().fit(images(3, 3, 16, 20))
    x = images(3, 3, 16, 20, seed=5)
    export(ensemble, tmp_path / "m.pt2", x, format="torch")
    got = torch_runner(tmp_path / "m.pt2")(x)
    assert [tuple(y.shape) for y in got] == [(3, 2, 16, 20), (2, 3, 2, 16, 20), (2, 3), (3,)]
    assert_equal(got, ensemble.predict(x))


class Tokens(nn.Module):
    """Integers in, a dict out."""

    def __init__(self):
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, tokens):
        return {"logits": self.head(self.mix(self.embed(tokens)).mean(1)), "more": None}


def test_token_ids_and_a_picked_output(tmp_path):
    torch.manual_seed(0)
    ensemble = cmcl.Ensemble(Tokens, 2, share_after="mix", output=lambda out: out["logits"])
    x = torch.randint(11, (5, 7))
    done = export(ensemble, tmp_path / "m.pt2", x, format="torch")
    assert done.input == "int64 (batch, 7)"
    assert_equal(torch_runner(tmp_path / "m.pt2")(x[:3]), ensemble.predict(x[:3]))


@needs_onnx
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(cmcl.networks.NETWORKS))
def test_every_network_as_onnx(name, tmp_path):
    torch.manual_seed(0)
    ensemble = cmcl.Ensemble(cmcl.networks.NETWORKS[name], 2, share_after="stem")
    shape = (3, 75, 125) if name == "fcn" else (3, 32, 32)
    ensemble.transform = MeanStd().fit(images(4, *shape))
    export(ensemble, tmp_path / "m.onnx", images(3, *shape))
    x = images(2, *shape, seed=9)
    assert_equal(onnx_runner(tmp_path / "m.onnx")(x), ensemble.predict(x))


@needs_onnx
@pytest.mark.slow
def test_expected_pooling_as_onnx(tmp_path):
    torch.manual_seed(0)
    network = partial(cmcl.networks.cnn, filters=(4, 4), size=15, kernel=3, padding=1, expected_pooling=True)
    ensemble = cmcl.Ensemble(network, 2, share_after="stem")
    export(ensemble, tmp_path / "m.onnx", torch.randn(3, 3, 15, 15))
    x = torch.randn(5, 3, 15, 15)
    assert_equal(onnx_runner(tmp_path / "m.onnx")(x), ensemble.predict(x))


class Counting(nn.Linear):
    """What Python decides is frozen by tracing: here, that the first call is a call like all others."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * self.calls


def test_a_graph_that_differs_is_not_written(tmp_path):
    torch.manual_seed(0)
    ensemble = cmcl.Ensemble(lambda: Counting(4, 3), 2)
    with pytest.raises(ValueError, match="must agree with PyTorch within 0.0001. Got .*probs"):
        export(ensemble, tmp_path / "m.pt2", torch.randn(4, 4), format="torch")
    assert not list(tmp_path.iterdir())


def test_equally_sure_members_may_be_chosen_either_way():
    """Rounding decides there; a choice that is worse by more than the tolerance is an error."""
    entropies = torch.tensor([[1.0, 0.5], [1.00001, 0.2]])  # (M, B)
    probs = torch.full((2, 2, 3), 1 / 3)
    expected = cmcl.Prediction(probs[0], probs, entropies, torch.tensor([0, 1]))

    def answer(chosen):
        return lambda x: [probs[0][: len(x)], probs[:, : len(x)], entropies[:, : len(x)], chosen[: len(x)]]

    found = exporting._compare(answer(torch.tensor([1, 1])), torch.zeros(2, 1), expected)
    assert found["chosen"] == pytest.approx(1e-5, rel=0.1)
    with pytest.raises(ValueError, match="'chosen': 0.3"):
        exporting._compare(answer(torch.tensor([0, 0])), torch.zeros(2, 1), expected)


def told(path):
    """What a file says of itself."""
    if path.suffix == ".onnx":
        import onnx

        return {entry.key: entry.value for entry in onnx.load(path).metadata_props}
    extra = {ABOUT: ""}
    torch.export.load(path, extra_files=extra)
    return json.loads(extra[ABOUT])


@pytest.mark.parametrize("suffix", [pytest.param("onnx", marks=needs_onnx), "pt2"])
def test_a_file_describes_itself(suffix, tmp_path):
    torch.manual_seed(1)
    ensemble = cmcl.Ensemble(Skip, 4, share_after="relu", share_at_test="sampled")
    path, x, form = tmp_path / f"m.{suffix}", torch.randn(5, 4), "onnx" if suffix == "onnx" else "torch"
    export(ensemble, path, x, format=form)
    facts = {"cmcl": cmcl.__version__, "members": "4", "sharing": "expected"}
    assert told(path) == facts
    ensemble.share_at_test = "off"
    export(ensemble, path, x, format=form, classes=["Ä", "b", "c"], checksum="1f")
    assert told(path) == facts | {"sharing": "off", "classes": '["Ä", "b", "c"]', "weights_sha256": "1f"}
    ensemble.classes = ("x", "y", "z")
    export(ensemble, path, x, format=form)
    assert told(path)["classes"] == '["x", "y", "z"]'
    ensemble.classes = ("x", "y")  # it answers more than it was trained on
    export(ensemble, path, x, format=form)
    assert "classes" not in told(path)


@pytest.mark.parametrize("format", [pytest.param("onnx", marks=needs_onnx), "torch"])
def test_a_file_holds_no_paths_of_this_machine(format, tmp_path):
    export(whitened(), tmp_path / "m", images(3, 1, 8, 8), format=format)
    parts = [(tmp_path / "m").read_bytes()]
    if format == "torch":
        with zipfile.ZipFile(tmp_path / "m") as archive:
            parts += [archive.read(name) for name in archive.namelist()]
    for path in (Path(__file__).parents[1], Path(torch.__file__).parents[1], "site-packages", "export.py"):
        assert not any(str(path).encode() in part for part in parts), path


def test_errors(tmp_path, monkeypatch):
    ensemble = cmcl.Ensemble(lambda: nn.Linear(4, 3), 2)
    with pytest.raises(ValueError, match="classes must name the 3 .* Got 2."):
        export(ensemble, tmp_path / "m", torch.randn(4, 4), format="torch", classes=["a", "b"])
    with pytest.raises(ValueError, match="format must be one of 'onnx', 'torch'. Got 'tflite'."):
        export(ensemble, tmp_path / "m", torch.randn(4, 4), format="tflite")
    with pytest.raises(ValueError, match="at least 2 inputs. Got a torch.float32 tensor of shape"):
        export(ensemble, tmp_path / "m", torch.randn(1, 4))
    with pytest.raises(ValueError, match="compute in float32. Got a torch.uint8"):
        export(ensemble, tmp_path / "m", torch.zeros(2, 4, dtype=torch.uint8))
    with pytest.raises(ValueError, match="path must be a file to write, such as .* Got a folder."):
        export(ensemble, tmp_path, torch.randn(4, 4))
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ImportError, match=r"pip install 'confident-mcl\[export\]'"):
        export(ensemble, tmp_path / "m", torch.randn(4, 4))
    assert not list(tmp_path.iterdir())


@needs_onnx
def test_too_much_for_one_onnx_file(tmp_path, monkeypatch):
    monkeypatch.setattr(exporting, "_ONE_FILE", 100)
    with pytest.raises(ValueError, match="below 2 GiB .* Got 120 bytes. Export it with format='torch'."):
        export(cmcl.Ensemble(lambda: nn.Linear(4, 3), 2), tmp_path / "m.onnx", torch.randn(4, 4))
    assert not list(tmp_path.iterdir())


@needs_onnx
@pytest.mark.real
@pytest.mark.slow
@pytest.mark.skipif("CMCL_DATA" not in os.environ, reason="CMCL_DATA names no folder of data sets")
def test_the_zoo_on_real_images(tmp_path):
    """Whitening of 3,072 values, five ResNet-20: the case that the tolerance is for."""
    root = os.environ["CMCL_DATA"]
    ensemble = load(Path(__file__).parents[1] / "zoo" / "cifar10-resnet20-cmcl", root=root)
    test = load_data("cifar10", split="test", root=root).images
    export(ensemble, tmp_path / "m.onnx", test[:20])
    assert_equal(onnx_runner(tmp_path / "m.onnx")(test[20:60]), ensemble.predict(test[20:60]))


@pytest.fixture
def saved(tmp_path):
    """An ensemble for the digits, saved."""
    torch.manual_seed(0)
    ensemble = cmcl.Ensemble(small_cnn, 2, share_after="stem")
    ensemble.transform = MeanStd().fit(cmcl.data.load("digits", split="train"))
    ensemble.save(tmp_path / "saved")
    return tmp_path / "saved"


@needs_onnx
def test_the_command(saved, tmp_path, cmcl):
    """The data set is known from the transform; the graph needs nothing but numpy and onnxruntime."""
    code, out, err = cmcl("export", saved, "-o", tmp_path / "m.onnx", "--limit", 20)
    assert (code, err) == (0, "")
    assert "input uint8 (batch, 1, 8, 8)" in out
    assert "agrees with PyTorch on 20 inputs" in out
    import onnxruntime

    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    test = load_data("digits", split="test")
    probs, chosen = session.run(["probs", "chosen"], {"input": test.images.numpy()})
    expected = load(saved).predict(test.images)
    np.testing.assert_allclose(probs, expected.probs, atol=1e-4)
    assert (chosen == expected.chosen.numpy()).mean() > 0.99
    about = told(tmp_path / "m.onnx")
    assert json.loads(about["classes"]) == list(test.classes)
    assert about["weights_sha256"] == json.loads((saved / "config.json").read_text())["weights"]["sha256"]


def test_an_ensemble_that_answers_fewer_classes_than_its_set_has(tmp_path, cmcl):
    ensemble = Ensemble(partial(small_cnn, classes=5), 2)
    ensemble.transform = MeanStd().fit(load_data("digits"))
    ensemble.save(tmp_path / "five")
    words = ("export", tmp_path / "five", "-o", tmp_path / "m.pt2", "--limit", 5)
    assert cmcl(*words)[0] == 0
    assert "classes" not in told(tmp_path / "m.pt2")


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.classify = nn.Linear(6, 5)

    def forward(self, x):
        return self.classify(x if x.sum() > 0 else -x)


class Masked(nn.Module):
    """A transformer that looks at its mask's values to see whether it is causal; or is told."""

    def __init__(self, **told):
        super().__init__()
        layer = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)
        self.encode, self.classify, self.told = nn.TransformerEncoder(layer, 1), nn.Linear(6, 5), told
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(4))

    def forward(self, x):
        return self.classify(self.encode(x[:, None].expand(-1, 4, -1), mask=self.mask, **self.told).mean(1))


def scripted():
    return nn.Sequential(torch.jit.script(nn.Linear(6, 8)), nn.Linear(8, 5))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is")
@pytest.mark.parametrize("network", [Branching, Masked, scripted])
def test_what_cannot_be_recorded_is_one_clear_error(network, tmp_path, capfd):
    with pytest.raises(ValueError, match="must be networks that torch.export can record") as raised:
        export(cmcl.Ensemble(network, 2), tmp_path / "m.pt2", torch.randn(4, 6), format="torch")
    assert "\n" not in str(raised.value)
    assert raised.value.__cause__ is None
    assert raised.value.__context__ is None
    assert capfd.readouterr().err == ""
    assert list(tmp_path.iterdir()) == []


class Eigen(Branching):
    def forward(self, x):
        return self.classify(x) + torch.linalg.eigvalsh(x.T @ x)[:5]


@needs_onnx
def test_an_operation_that_onnx_has_not(tmp_path):
    ensemble = cmcl.Ensemble(Eigen, 2)
    with pytest.raises(ValueError, match="must have every operation .*eigh.* format='torch'") as raised:
        export(ensemble, tmp_path / "m.onnx", torch.randn(7, 6))
    assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_the_cure_that_the_document_names(tmp_path):
    assert "is_causal" in (Path(__file__).parents[1] / "docs" / "tutorials" / "export.md").read_text()
    ensemble = cmcl.Ensemble(lambda: Masked(is_causal=True), 2)
    export(ensemble, tmp_path / "m.pt2", torch.randn(4, 6), format="torch")
    assert (tmp_path / "m.pt2").exists()


@pytest.mark.parametrize(
    ("ensemble_type", "example", "message"),
    [
        (torch.float64, torch.randn(4, 6), "compute in float64. Got a torch.float32 tensor"),
        (torch.float32, torch.randn(4, 6).double(), "compute in float32. Got a torch.float64 tensor"),
        (torch.float32, torch.randn(4, 7), r"Got a torch.float32 tensor of shape \(4, 7\)"),
    ],
)
def test_an_example_that_does_not_fit(ensemble_type, example, message, tmp_path):
    ensemble = cmcl.Ensemble(lambda: nn.Linear(6, 5), 2).to(ensemble_type)
    with pytest.raises(ValueError, match=message):
        export(ensemble, tmp_path / "m.pt2", example, format="torch")


def test_a_full_disk(tmp_path, monkeypatch):
    """Not by torch's own writer, which ends the whole process there."""

    def full(path, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(tmp_path), "write_bytes", full)
    ensemble = Ensemble(lambda: nn.Linear(4, 3), 2)
    with pytest.raises(
        DiskFullError, match=r"model.pt2 must fit on its disk.*Free some space, or name another"
    ):
        export(ensemble, tmp_path / "model.pt2", torch.randn(5, 4), format="torch")
    assert not list(tmp_path.iterdir())
