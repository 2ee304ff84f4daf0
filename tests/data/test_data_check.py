from dataclasses import replace

import pytest

from cmcl.data import check, published
from cmcl.data.fetching import file_md5


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


def test_right_content_in_other_bytes_is_fine_with_a_note(tmp_path, cifar, monkeypatch):
    cifar.write(tmp_path)
    first = check("cifar10", root=tmp_path)
    facts = replace(
        published.PUBLISHED["cifar10"],
        counts=first["counts"],
        classes=tuple(first["classes"].values()),
        mean=tuple(first["mean"]),
        std=tuple(first["std"]),
    )
    monkeypatch.setitem(published.PUBLISHED, "cifar10", facts)
    report = check("cifar10", root=tmp_path)
    assert report["published"] is True
    assert report["notes"][0].startswith(
        "other bytes than the published files: cifar-10-batches-py/data_batch_1,"
    )
    md5s = {name: file_md5(tmp_path / name) for name in facts.files if (tmp_path / name).exists()}
    monkeypatch.setitem(published.PUBLISHED, "cifar10", replace(facts, files=md5s))
    assert check("cifar10", root=tmp_path)["notes"] == []


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
    report = check("shapes", groups=2, per_group=5, size=16)
    assert sum(report["classes"].values()) == 8 * 16 * 16
    assert report["groups"] == {"scene 000": 4, "scene 001": 4}


def test_a_folder_needs_no_test_split(tmp_path, write_image):
    write_image(tmp_path / "cat" / "x.png")
    assert check("folder", root=tmp_path)["counts"] == {"train": 1}
