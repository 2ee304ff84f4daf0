from dataclasses import replace

import pytest
import torch

from cmcl._files import digest
from cmcl.data import DATASETS, Dataset, check
from cmcl.data.inspect import _histogram


def publish(monkeypatch, **facts):
    """Change what is known of the published CIFAR-10."""
    monkeypatch.setitem(DATASETS, "cifar10", replace(DATASETS["cifar10"], **facts))


def publish_as(monkeypatch, report, **facts):
    same = {key: tuple(report[key]) for key in ("mean", "std")}
    classes = tuple(report["classes"].values())
    publish(
        monkeypatch,
        **{"sizes": report["counts"], "class_counts": classes, "checksums": report["checksums"]}
        | same
        | facts,
    )


def test_counts_histogram_and_statistics(tmp_path, cifar, monkeypatch):
    report = check("cifar10", root=cifar.write(tmp_path))
    images, labels = cifar.train()
    assert report["counts"] == {"train": 100, "test": 20}
    assert report["classes"]["cat"] == labels.count(3)
    assert report["mean"] == pytest.approx((images / 255).mean((0, 2, 3)))
    assert report["std"] == pytest.approx((images / 255).std((0, 2, 3)))
    assert report["published"] is False
    assert "50,000 train, 10,000 test images; here are 100 train, 20 test" in report["notes"][0]
    publish(monkeypatch, sizes=report["counts"])
    notes = check("cifar10", root=tmp_path)["notes"]
    assert ["classes" in notes[0], "mean" in notes[1], "std" in notes[2]] == [True] * 3


def test_right_content_in_other_bytes_is_fine_with_a_note(tmp_path, cifar, monkeypatch):
    report = check("cifar10", root=cifar.write(tmp_path))
    publish_as(monkeypatch, report)
    report = check("cifar10", root=tmp_path)
    assert report["published"] is True
    assert report["notes"][0].startswith(
        "other bytes than the published files: cifar-10-batches-py/data_batch_1,"
    )
    files = {name: digest(tmp_path / name, "md5") for name in ("cifar-10-batches-py/test_batch",)}
    publish_as(monkeypatch, report, files=files)
    assert check("cifar10", root=tmp_path)["notes"] == []


def test_a_single_changed_pixel_or_label_is_not_published(tmp_path, cifar, monkeypatch):
    publish_as(monkeypatch, check("cifar10", root=cifar.write(tmp_path)))
    cifar.data["data_batch_1"][0, 0] ^= 1
    cifar.labels["test_batch"].reverse()
    report = check("cifar10", root=cifar.write(tmp_path))
    assert report["published"] is False
    assert report["notes"] == ["some images or labels of train and test are not the published ones"]


def test_validation_is_taken_from_the_training_split():
    report = check("digits", validation=0.1)
    assert list(report["counts"]) == ["train", "test", "validation"]
    assert report["counts"]["train"] + report["counts"]["validation"] == 1438
    assert sum(report["classes"].values()) == report["counts"]["train"]
    assert report["published"] is None


def test_a_folder_may_have_any_splits_but_train(tmp_path, write_image):
    write_image(tmp_path / "a" / "cat" / "x.png")
    assert check("folder", root=tmp_path / "a")["counts"] == {"train": 1}
    for i, split in enumerate(("train", "train", "validation", "test")):
        write_image(tmp_path / "b" / split / "cat" / f"{i}.png", seed=i)
    assert check("folder", root=tmp_path / "b")["counts"] == {"train": 2, "validation": 1, "test": 1}
    with pytest.raises(ValueError, match="no validation split on disk"):
        check("folder", root=tmp_path / "b", validation=0.5)


def test_segmentation_counts_pixels_and_groups_and_has_a_seed_of_its_own():
    def checked(seed, own):
        options = {"groups": 2, "per_group": 5, "size": 16, "seed": own}
        return check("shapes", validation=0.5, seed=seed, options=options)

    report = check("shapes", options={"groups": 2, "per_group": 5, "size": 16})
    assert sum(report["classes"].values()) == 8 * 16 * 16
    assert report["groups"] == {"scene 000": 4, "scene 001": 4}
    first, other, own = (checked(*seeds)["checksums"] for seeds in ((0, 0), (1, 0), (0, 1)))
    assert first["test"] == other["test"] != own["test"]
    assert first["validation"] != other["validation"]


def test_class_255_is_counted_and_ignored_pixels_are_not():
    names = tuple(map(str, range(300)))
    images = torch.zeros(2, 1, 2, 2)
    assert _histogram(Dataset(images, torch.tensor([255, 299]), names))["255"] == 1
    masks = torch.tensor([0, 1, 1, 255], dtype=torch.uint8).view(1, 2, 2)
    assert _histogram(Dataset(images[:1], masks, ("a", "b"))) == {"a": 1, "b": 2}


def test_names():
    with pytest.raises(ValueError, match="Did you mean 'digits'"):
        check("digit")
