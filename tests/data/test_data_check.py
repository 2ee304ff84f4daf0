from dataclasses import replace

import pytest
import torch

from cmcl._files import digest
from cmcl.data import Dataset, check, published
from cmcl.data.checking import _histogram


def test_counts_histogram_and_statistics(tmp_path, cifar):
    report = check("cifar10", root=cifar.write(tmp_path))
    images, labels = cifar.train()
    assert report["counts"] == {"train": 100, "test": 20}
    assert report["classes"]["cat"] == labels.count(3)
    assert report["mean"] == pytest.approx((images / 255).mean((0, 2, 3)))
    assert report["std"] == pytest.approx((images / 255).std((0, 2, 3)))
    assert report["published"] is False
    assert report["notes"][0].startswith(
        "the published set has 50,000 train, 10,000 test images; here are 100"
    )


def publish(monkeypatch, report):
    """Make what was found the published CIFAR-10, except for the bytes of the files."""
    facts = replace(
        published.PUBLISHED["cifar10"],
        counts=report["counts"],
        classes=tuple(report["classes"].values()),
        mean=tuple(report["mean"]),
        std=tuple(report["std"]),
    )
    monkeypatch.setitem(published.PUBLISHED, "cifar10", facts)
    monkeypatch.setitem(published.CHECKSUMS, "cifar10", report["checksums"])
    return facts


def test_right_content_in_other_bytes_is_fine_with_a_note(tmp_path, cifar, monkeypatch):
    cifar.write(tmp_path)
    facts = publish(monkeypatch, check("cifar10", root=tmp_path))
    report = check("cifar10", root=tmp_path)
    assert report["published"] is True
    assert report["notes"][0].startswith(
        "other bytes than the published files: cifar-10-batches-py/data_batch_1,"
    )
    md5s = {name: digest(tmp_path / name, "md5") for name in facts.files if (tmp_path / name).exists()}
    monkeypatch.setitem(published.PUBLISHED, "cifar10", replace(facts, files=md5s))
    assert check("cifar10", root=tmp_path)["notes"] == []


def test_a_single_changed_pixel_or_label_is_not_published(tmp_path, cifar, monkeypatch):
    publish(monkeypatch, check("cifar10", root=cifar.write(tmp_path)))
    cifar.data["data_batch_1"][0, 0] ^= 1
    cifar.labels["test_batch"].reverse()
    report = check("cifar10", root=cifar.write(tmp_path))
    assert report["published"] is False
    assert report["notes"] == [
        "some images or labels of train and test are not the published ones, though the figures agree"
    ]


def test_other_content_is_told(tmp_path, cifar, monkeypatch):
    cifar.write(tmp_path)
    first = check("cifar10", root=tmp_path)
    facts = replace(published.PUBLISHED["cifar10"], counts=first["counts"])
    monkeypatch.setitem(published.PUBLISHED, "cifar10", facts)
    notes = check("cifar10", root=tmp_path)["notes"]
    assert [note.split(" (")[0] for note in notes] == [
        "the published classes have",
        "the published set has mean",
        "the published set has std",
    ]


def test_validation_is_taken_from_the_training_split():
    report = check("digits", validation=0.1)
    assert list(report["counts"]) == ["train", "test", "validation"]
    assert report["counts"]["train"] + report["counts"]["validation"] == 1438
    assert sum(report["classes"].values()) == report["counts"]["train"]


def test_segmentation_counts_pixels_and_groups():
    report = check("shapes", options={"groups": 2, "per_group": 5, "size": 16})
    assert sum(report["classes"].values()) == 8 * 16 * 16
    assert report["groups"] == {"scene 000": 4, "scene 001": 4}


def test_a_folder_needs_no_test_split(tmp_path, write_image):
    write_image(tmp_path / "cat" / "x.png")
    assert check("folder", root=tmp_path)["counts"] == {"train": 1}


def test_a_validation_split_on_disk(tmp_path, write_image):
    for i, split in enumerate(("train", "train", "validation", "test")):
        write_image(tmp_path / split / "cat" / f"{i}.png", seed=i)
    assert check("folder", root=tmp_path)["counts"] == {"train": 2, "validation": 1, "test": 1}
    with pytest.raises(ValueError, match="no validation split on disk .* Got both. Leave out validation"):
        check("folder", root=tmp_path, validation=0.5)


def test_the_seed_of_a_set_is_not_the_seed_of_what_is_held_out():
    def checksums(seed, own):
        options = {"groups": 2, "per_group": 5, "size": 16, "seed": own}
        return check("shapes", validation=0.5, seed=seed, options=options)["checksums"]

    assert checksums(0, 0)["test"] == checksums(1, 0)["test"] != checksums(0, 1)["test"]
    assert checksums(0, 0)["validation"] != checksums(1, 0)["validation"]


def test_class_255_is_counted_and_ignored_pixels_are_not():
    names = tuple(map(str, range(300)))
    images = torch.zeros(2, 1, 2, 2)
    assert _histogram(Dataset(images, torch.tensor([255, 299]), names))["255"] == 1
    masks = torch.tensor([0, 1, 1, 255], dtype=torch.uint8).view(1, 2, 2)
    assert _histogram(Dataset(images[:1], masks, ("a", "b"))) == {"a": 1, "b": 2}


def test_arrays_are_looked_at_in_python():
    with pytest.raises(ValueError, match="which live in Python"):
        check("arrays")
