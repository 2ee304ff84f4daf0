"""Saved ensembles come back equal, or say what is wrong with the folder."""

import json
import os
import pickletools
import shutil
import time
from hashlib import sha256

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import cmcl
from cmcl import Ensemble
from cmcl._files import DiskFullError
from cmcl.data.transforms import ZCA, MeanStd
from cmcl.serialization import save_temperature


def small():
    return cmcl.networks.cnn(classes=4, channels=1, filters=(2, 3), kernel=3, padding=1, hidden=5, size=8)


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(0)
    ensemble = Ensemble(small, 3, share_after="stem", share_prob=0.5, share_at_test="off")
    ensemble.save(tmp_path / "ensemble")
    return ensemble, tmp_path / "ensemble"


def edit(folder, *, seal=True, **changes):
    """Change entries of config.json, with a checksum that fits if `seal`."""
    path = folder / "config.json"
    values = {**json.loads(path.read_text()), **changes}
    values = {key: value for key, value in values.items() if value is not ...}
    if seal:
        rest = {key: value for key, value in values.items() if key != "sha256"}
        values["sha256"] = sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(values))


def weights(folder):
    (path,) = folder.glob("*.safetensors")
    return path


def test_round_trip(saved):
    ensemble, folder = saved
    loaded = cmcl.load(folder)
    assert (loaded.share_after, loaded.share_prob, loaded.share_at_test) == ("stem", 0.5, "off")
    assert not loaded.training
    assert all(value.equal(ensemble.state_dict()[key]) for key, value in loaded.state_dict().items())
    x = torch.randn(5, 1, 8, 8)
    assert loaded.predict(x).probs.equal(ensemble.predict(x).probs)


def test_the_temperature_is_saved(saved, tmp_path):
    ensemble, _ = saved
    x = torch.randn(5, 1, 8, 8)
    plain = ensemble.predict(x)
    ensemble.temperature = 0.5
    ensemble.save(tmp_path / "scaled")
    loaded = cmcl.load(tmp_path / "scaled")
    found = loaded.predict(x)
    squares = plain.probs.square()
    torch.testing.assert_close(
        found.probs, squares / squares.sum(1, keepdim=True)
    )  # p ** (1 / 0.5), normalised
    assert found.member_probs.equal(plain.member_probs)
    assert (loaded.temperature, cmcl.load(saved[1]).temperature) == (0.5, None)
    ensemble.temperature = 0
    for use in (lambda: ensemble.save(tmp_path / "scaled"), lambda: ensemble.predict(x)):
        with pytest.raises(ValueError, match="temperature must be"):
            use()


def test_a_temperature_for_a_saved_ensemble(saved, tmp_path):
    """Weights and everything else stay as they are, and the folder can be loaded."""
    folder = tmp_path / "copy"
    shutil.copytree(saved[1], folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    save_temperature(folder, 0.25)
    assert cmcl.load(folder).temperature == 0.25
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    old, new = (json.loads(files.pop("config.json")) for files in (before, after))
    assert after == before
    assert {key for key in new if new[key] != old[key]} == {"temperature", "sha256"}
    with pytest.raises(ValueError, match="temperature must be"):
        save_temperature(folder, 0.0)
    assert cmcl.load(folder).temperature == 0.25


@pytest.mark.parametrize("name", cmcl.networks.NETWORKS)
def test_every_network_of_ours_needs_no_factory(name, tmp_path):
    options = {"filters": (2, 3), "hidden": 4} if name == "cnn" else {}
    ensemble = Ensemble(
        lambda: cmcl.networks.NETWORKS[name](classes=3, channels=1, **options), 1, share_after="stem"
    )
    ensemble.save(tmp_path)
    x = torch.randn(2, 1, 32, 32)
    torch.testing.assert_close(cmcl.load(tmp_path).predict(x).probs, ensemble.predict(x).probs)


class Own(nn.Module):
    def __init__(self, outputs=3):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, outputs)

    def forward(self, x):
        return self.b(self.a(x).relu())


class TestOwnNetworks:
    def test_need_a_factory(self, tmp_path):
        ensemble = Ensemble(Own, 2, share_after="a")
        ensemble.save(tmp_path)
        with pytest.raises(ValueError, match=r"holds 'Own', which is not .* Pass network="):
            cmcl.load(tmp_path)
        x = torch.randn(2, 4)
        for network in (Own, [Own(), Own()]):
            assert cmcl.load(tmp_path, network=network).predict(x).probs.equal(ensemble.predict(x).probs)

    def test_the_factory_may_start_from_equal_weights(self, tmp_path):
        import copy

        net = Own()
        Ensemble(Own, 2).save(tmp_path)
        assert len(cmcl.load(tmp_path, network=lambda: copy.deepcopy(net)).members) == 2

    @pytest.mark.parametrize(
        ("network", "reason"),
        [
            (lambda: nn.Linear(4, 3), "Missing key"),
            (lambda: Own(outputs=7), "size mismatch for b.weight"),
        ],
    )
    def test_one_that_does_not_fit(self, network, reason, tmp_path):
        Ensemble(Own, 2).save(tmp_path)
        with pytest.raises(ValueError, match=f"does not fit member 0.*{reason}"):
            cmcl.load(tmp_path, network=network)

    def test_tied_weights(self, tmp_path):
        shared = nn.Linear(4, 4)

        def tied():
            net = Own()
            net.a = shared
            return net

        ensemble = Ensemble(tied, 2)
        ensemble.save(tmp_path)
        x = torch.randn(2, 4)
        assert cmcl.load(tmp_path, network=tied).predict(x).probs.equal(ensemble.predict(x).probs)


class TestRunFolders:
    def test_with_one_ensemble(self, saved):
        ensemble, folder = saved
        assert cmcl.load(folder.parent).state_dict().keys() == ensemble.state_dict().keys()

    def test_an_ensemble_of_its_own_comes_first(self, saved):
        ensemble, folder = saved
        Ensemble(small, 2).save(folder / "ensemble")
        assert len(cmcl.load(folder).members) == len(ensemble.members)

    def test_that_was_never_saved(self, tmp_path):
        (tmp_path / "checkpoints").mkdir()
        with pytest.raises(FileNotFoundError, match="checkpoints only"):
            cmcl.load(tmp_path)


class Counted(nn.Module):
    """A count in double precision, as some metrics have, and a table that is not saved."""

    def __init__(self):
        super().__init__()
        self.classify = nn.Linear(6, 5)
        self.register_buffer("seen", torch.full((), 0.1, dtype=torch.float64))
        self.register_buffer("scale", torch.ones(6), persistent=False)

    def forward(self, x):
        return self.classify(x * self.scale)


def types(ensemble):
    named = [*ensemble.members[0].named_parameters(), *ensemble.members[0].named_buffers()]
    return {name: tensor.dtype for name, tensor in named}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_each_tensor_keeps_its_type_but_half_becomes_single(tmp_path, dtype):
    ensemble = Ensemble(Counted, 2).to(dtype)
    for member in ensemble.members:
        member.seen = member.seen.double()
    ensemble.save(tmp_path)
    stored = load_file(weights(tmp_path))
    assert (stored["members.0.classify.weight"].dtype, stored["members.0.seen"].dtype) == (
        dtype,
        torch.float64,
    )
    loaded = cmcl.load(tmp_path, network=Counted)
    if dtype == torch.float16:
        found = types(loaded)
        assert (found["classify.weight"], found["seen"]) == (torch.float32, torch.float64)
        return
    assert types(loaded) == types(ensemble)
    assert loaded.members[1].seen.equal(ensemble.members[1].seen)
    x = torch.randn(4, 6, dtype=dtype)
    assert loaded.predict(x).probs.equal(ensemble.predict(x).probs)


def test_single_precision_of_a_network_that_is_built_in_double(tmp_path):
    ensemble = Ensemble(Counted, 2)
    ensemble.save(tmp_path)
    loaded = cmcl.load(tmp_path, network=lambda: Counted().double())
    assert types(loaded) == types(ensemble)
    x = torch.randn(4, 6)
    assert loaded.predict(x).probs.equal(ensemble.predict(x).probs)


def test_channels_last(saved, tmp_path):
    ensemble, _ = saved
    ensemble.to(memory_format=torch.channels_last).save(tmp_path / "last")
    x = torch.randn(5, 1, 8, 8)
    torch.testing.assert_close(cmcl.load(tmp_path / "last").predict(x).probs, ensemble.predict(x).probs)


class TestSaving:
    def test_saving_again_where_the_weights_were_lost(self, saved, tmp_path):
        ensemble, folder = saved
        weights(folder).unlink()
        nn.init.zeros_(ensemble.members[0].stem[0].weight)
        ensemble.save(folder)
        assert cmcl.load(folder).members[0].stem[0].weight.abs().max() == 0

    def test_never_a_pickle(self, saved):
        for path in saved[1].iterdir():
            with pytest.raises(ValueError, match="opcode|pickle"):
                list(pickletools.genops(path.read_bytes()))

    def test_saving_again_replaces_and_leaves_nothing_behind(self, saved):
        ensemble, folder = saved
        nn.init.zeros_(ensemble.members[0].stem[0].weight)
        ensemble.save(folder)
        assert len(list(folder.iterdir())) == 2
        assert cmcl.load(folder).members[0].stem[0].weight.abs().max() == 0

    def test_an_interrupted_save_keeps_the_old_one(self, saved, monkeypatch):
        ensemble, folder = saved
        before = cmcl.load(folder).state_dict()
        nn.init.zeros_(ensemble.members[0].stem[0].weight)
        real = os.fsync
        calls = iter([real, real])  # the weights and their folder reach the disk; config.json does not

        def fsync(handle):
            return next(calls, full)(handle)

        def full(handle):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", fsync)
        with pytest.raises(
            DiskFullError, match=r"config.json must fit .*No space left.* or name another place"
        ):
            ensemble.save(folder)
        after = cmcl.load(folder).state_dict()
        assert all(value.equal(after[key]) for key, value in before.items())

    def test_parts_of_killed_writes_are_removed(self, saved):
        """One of an hour ago is nobody's any more; a fresh one may be another process's."""
        ensemble, folder = saved
        old, fresh, foreign = (
            folder / name
            for name in (".a.safetensors.0a_bcdef.part", ".config.json.0abcdefg.part", ".note.part")
        )
        for path in (old, fresh, foreign):
            path.touch()
        for path in (old, foreign):
            os.utime(path, (0, time.time() - 3700))
        ensemble.save(folder)
        assert not old.exists()
        assert fresh.exists()
        assert foreign.exists()

    def test_another_programs_config_is_not_overwritten(self, tmp_path):
        (tmp_path / "config.json").write_text('{"model_type": "bert"}')
        with pytest.raises(ValueError, match="belongs to another program"):
            Ensemble(Own, 2).save(tmp_path)
        assert json.loads((tmp_path / "config.json").read_text()) == {"model_type": "bert"}


class TestDamage:
    def test_no_folder(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="Ensemble.save"):
            cmcl.load(tmp_path / "nothing")

    def test_missing_weights(self, saved):
        weights(saved[1]).unlink()
        with pytest.raises(FileNotFoundError, match="is missing. Copy the whole folder"):
            cmcl.load(saved[1])

    @pytest.mark.parametrize(
        "content",
        [b"{", b"\xff\xfe\x00", b"[1]", b'{"format": "other"}', b"", b"[" * 100_000, b"9" * 10_000],
        ids=["cut", "bytes", "list", "foreign", "empty", "deep", "digits"],
    )
    def test_foreign_config(self, saved, content):
        (saved[1] / "config.json").write_bytes(content)
        with pytest.raises(ValueError, match=r"config.json must be"):
            cmcl.load(saved[1])

    @pytest.mark.parametrize("version", [99, 1, "2", None])
    def test_another_version(self, saved, version):
        edit(saved[1], version=version)
        with pytest.raises(ValueError, match=r"format version 2.* Got"):
            cmcl.load(saved[1])

    @pytest.mark.parametrize(
        "changes",
        [
            {"share_prob": 0.6},
            {"share_at_test": "expected"},
            {"members": [{"network": "cnn", "options": {"classes": 4, "expected_pooling": True}}] * 3},
            {"classes": ["a", "b", "c", "d"]},
            {"sha256": ...},
            {"weights": ...},
        ],
    )
    def test_an_edited_config_is_seen(self, saved, changes):
        """None of these shows in the weights, and all change what the ensemble predicts."""
        edit(saved[1], seal=False, **changes)
        with pytest.raises(ValueError, match="edited.* checksum"):
            cmcl.load(saved[1])

    def test_the_same_content_in_another_layout_is_fine(self, saved):
        edit(saved[1], seal=False)
        assert cmcl.load(saved[1]).share_prob == 0.5

    @pytest.mark.parametrize(
        ("changes", "name"),
        [
            *(({key: ...}, key) for key in ("members", "weights", "share_after")),
            ({"weights": {"file": "x.safetensors"}}, "sha256"),
            ({"weights": {"file": 3, "sha256": "0"}}, "weights.file"),
            ({"weights": {"file": "../elsewhere.safetensors", "sha256": ""}}, "weights.file"),
            ({"classes": "cat"}, "classes"),
            ({"classes": [1, 2]}, "classes.0"),
            ({"members": ["cnn"]}, "members.0"),
            ({"members": []}, "members"),
            ({"share_prob": "half"}, "share_prob"),
            ({"share_at_test": "never"}, "share_at_test"),
            ({"stem": "layer1"}, "stem"),
            ({"output": 3}, "output"),
            ({"colour": 3}, "colour"),
        ],
    )
    def test_malformed_entries(self, saved, changes, name):
        edit(saved[1], **changes)
        with pytest.raises(ValueError, match=f"config.json: .*{name}"):
            cmcl.load(saved[1])

    @pytest.mark.parametrize(
        ("member", "message"),
        [
            ({"network": "resnet9000", "options": {}}, "'resnet9000', which is not .* Pass network="),
            ({"network": "cnn", "options": None}, "'cnn', which is not .* Pass network="),
            ({"network": "cnn", "options": {"colour": 1}}, "its cnn cannot be built"),
            ({"network": "cnn", "options": {"classes": 5, "channels": 1}}, "size mismatch"),
        ],
    )
    def test_members_that_cannot_be_built(self, saved, member, message):
        edit(saved[1], members=[member] * 3)
        with pytest.raises(ValueError, match=message):
            cmcl.load(saved[1])

    def test_huge_sizes_are_refused_before_they_are_allocated(self, saved, monkeypatch):
        config = json.loads((saved[1] / "config.json").read_text())
        config["members"][0]["options"]["hidden"] = 10**7
        edit(saved[1], members=config["members"])
        allocated = []
        kaiming = nn.init.kaiming_uniform_
        monkeypatch.setattr(
            nn.init,
            "kaiming_uniform_",
            lambda tensor, *a, **k: allocated.append(tensor.device.type) or kaiming(tensor, *a, **k),
        )
        with pytest.raises(ValueError, match="does not fit member 0.*size mismatch"):
            cmcl.load(saved[1])
        assert set(allocated) <= {"meta"}

    def test_fewer_members_named_than_saved(self, saved):
        config = json.loads((saved[1] / "config.json").read_text())
        edit(saved[1], members=config["members"][:2])
        with pytest.raises(ValueError, match="2 members named, 3 saved"):
            cmcl.load(saved[1])

    def test_a_foreign_file_with_the_right_checksum(self, saved):
        path = weights(saved[1])
        path.write_bytes(b"not safetensors at all")
        edit(saved[1], weights={"file": path.name, "sha256": sha256(path.read_bytes()).hexdigest()})
        with pytest.raises(ValueError, match="must be a safetensors file"):
            cmcl.load(saved[1])

    def test_a_file_in_the_way(self, saved, tmp_path):
        (tmp_path / "file").touch()
        with pytest.raises(ValueError, match="path must be a folder"):
            saved[0].save(tmp_path / "file")

    @pytest.mark.parametrize("position", [0, 8, 30, -1])
    def test_any_flipped_byte_is_seen(self, saved, position):
        path = weights(saved[1])
        data = bytearray(path.read_bytes())
        data[position] ^= 1
        path.write_bytes(data)
        with pytest.raises(ValueError, match="is damaged"):
            cmcl.load(saved[1])


class TestTransforms:
    """Raw images in, answers out: the transform of the images travels with the ensemble."""

    def raw(self):
        return torch.randint(256, (6, 1, 8, 8), dtype=torch.uint8)

    def test_a_small_one_travels(self, saved, tmp_path):
        ensemble, _ = saved
        ensemble.transform = MeanStd().fit(self.raw())
        ensemble.save(tmp_path / "with")
        images = self.raw()
        loaded = cmcl.load(tmp_path / "with")
        assert loaded.transform.checksum == ensemble.transform.checksum
        assert loaded.predict(images).probs.equal(ensemble.predict(images).probs)

    def test_names_of_classes(self, saved, tmp_path):
        ensemble, _ = saved
        ensemble.classes = [7, 8, 9]
        ensemble.save(tmp_path / "with")
        assert cmcl.load(tmp_path / "with").classes == ("7", "8", "9")
        ensemble.classes = "cat"
        with pytest.raises(TypeError, match="ensemble.classes must be a list of names.* Got 'cat'"):
            ensemble.save(tmp_path / "with")

    @pytest.fixture
    def whitened(self, saved, monkeypatch):
        ensemble, _ = saved
        monkeypatch.setattr("cmcl.serialization.SMALL", 100)
        ensemble.transform = ZCA().fit(cmcl.data.load("digits"))
        return ensemble

    def test_a_large_one_is_named_and_refitted(self, whitened, tmp_path):
        whitened.save(tmp_path / "with")
        assert not any(key.startswith("transform") for key in load_file(weights(tmp_path / "with")))
        images = self.raw()
        with pytest.raises(
            ValueError, match="zca fitted on digits, which was not saved.*root=.*with_transform"
        ):
            cmcl.load(tmp_path / "with").predict(images)
        with pytest.raises(ValueError, match="with_transform must find a transform"):
            cmcl.load(tmp_path / "with").save(tmp_path / "again", with_transform=True)
        cmcl.load(tmp_path / "with").save(tmp_path / "again")  # what describes it is kept
        for folder in ("with", "again"):
            loaded = cmcl.load(tmp_path / folder, root=tmp_path)
            torch.testing.assert_close(loaded.predict(images).probs, whitened.predict(images).probs)

    @pytest.mark.parametrize("on_request", [True, False])
    def test_a_large_one_is_saved_on_request_or_if_no_dataset_gives_it_again(
        self, whitened, on_request, tmp_path
    ):
        if not on_request:
            whitened.transform = ZCA().fit(torch.randint(256, (90, 1, 8, 8), dtype=torch.uint8))
        whitened.save(tmp_path / "with", with_transform=on_request)
        images = self.raw()
        assert cmcl.load(tmp_path / "with").predict(images).probs.equal(whitened.predict(images).probs)
