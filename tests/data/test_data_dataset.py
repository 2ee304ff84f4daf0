import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cmcl.data import DATASETS, Dataset, from_arrays, load, load_recipe, split_validation
from cmcl.data.dataset import (
    default_ignore_index,
    evenly_spaced,
    hold_out,
    not_ignored,
    outside_subset,
    stratified_subset,
)


def tiny(n=6, classes=3):
    images = torch.arange(n * 4, dtype=torch.uint8).view(n, 1, 2, 2)
    return Dataset(images, torch.arange(n) % classes, tuple("abc"[:classes]))


def sorted_by_class(n=100, classes=4):
    targets = torch.arange(classes).repeat_interleave(n // classes)
    images = torch.arange(n, dtype=torch.uint8).view(n, 1, 1, 1)
    return Dataset(images, targets, tuple("abcd"[:classes]))


def test_length_items_slices_and_subsets():
    data = tiny()
    assert len(data) == 6
    assert data != tiny()  # compared as objects: tensors have no single truth value
    image, target = data[4]
    assert image.tolist() == [[[16, 17], [18, 19]]]
    assert target == 1
    assert data[1:3].targets.tolist() == [1, 2]
    assert data[::-2].targets.tolist() == [2, 0, 1]
    assert data.subset([5, 0]).images[:, 0, 0, 0].tolist() == [20, 0]
    assert data.subset(data.targets == 1).images[:, 0, 0, 0].tolist() == [4, 16]
    assert len(data.subset([])) == 0
    groups = Dataset(data.images, data.targets, data.classes, groups=tuple("uvwxyz"))
    assert groups.subset([2, 0], split="part").groups == ("w", "u")
    assert groups.subset([2, 0], split="part").split == "part"


def test_evenly_spaced_examples():
    data = sorted_by_class()
    assert evenly_spaced(data, 8).targets.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [len(evenly_spaced(data, n)) for n in (1, 7, 99)] == [1, 7, 99]
    assert evenly_spaced(data, None) is evenly_spaced(data, 100) is evenly_spaced(data, 1000) is data


def test_a_stratified_subset_takes_equally_many_of_every_class():
    data = sorted_by_class()
    chosen = stratified_subset(data, 10)
    assert sorted(torch.bincount(chosen.targets).tolist()) == [2, 2, 3, 3]
    assert chosen.checksum == stratified_subset(data, 10).checksum
    assert (chosen.images.flatten().diff() > 0).all()  # in the order of the dataset
    assert stratified_subset(data, 100).checksum == data.checksum
    rest = outside_subset(data, 10)
    assert len(rest) == 90
    values = [part.images.flatten().tolist() for part in (data, chosen, rest)]  # all different
    assert sorted(values[1] + values[2]) == values[0]
    larger = stratified_subset(data, 25)
    assert set(chosen.images.flatten().tolist()) <= set(larger.images.flatten().tolist())
    scenes = load("shapes", groups=3, per_group=5, size=8)
    assert sorted(stratified_subset(scenes, 3).groups) == ["scene 000", "scene 001", "scene 002"]
    with pytest.raises(ValueError, match="at most 100.* Got 101"):
        stratified_subset(data, 101)


def test_checksum_is_of_the_content_alone():
    data = tiny()
    same = Dataset(data.images.clone(), data.targets.clone(), ("x", "y", "z"), "test", "elsewhere")
    assert data.checksum == same.checksum
    changed = data.images.clone()
    changed[0, 0, 0, 0] += 1
    others = [
        (changed, data.targets),
        (data.images, data.targets.flip(0)),
        (data.images.view(6, 4, 1, 1), data.targets),
    ]
    assert all(Dataset(*other, data.classes).checksum != data.checksum for other in others)


IMAGES = torch.zeros(2, 1, 2, 2)


@pytest.mark.parametrize(
    ("images", "targets", "classes", "error", "match"),
    [
        (torch.zeros(2, 3), torch.zeros(2).long(), 2, ValueError, r"shape \(N,C,H,W\). Got \(2, 3\)"),
        (IMAGES.int(), torch.zeros(2).long(), 2, TypeError, "uint8 or floating"),
        (IMAGES, torch.zeros(3).long(), 2, ValueError, r"targets .* Got \(3,\)"),
        (IMAGES, torch.zeros(2), 2, TypeError, "int64"),
        (IMAGES, torch.tensor([0, 2]), 2, ValueError, "between 0 and 1 .* Got 2.* start at 0"),
        (IMAGES, torch.tensor([-1, 0]), 2, ValueError, "Got -1"),
        (IMAGES[:1], torch.full((1, 2, 2), 7).byte(), 2, ValueError, "Got 7"),
    ],
)
def test_wrong_values(images, targets, classes, error, match):
    with pytest.raises(error, match=match):
        Dataset(images, targets, tuple(map(str, range(classes))))
    with pytest.raises(ValueError, match=r"groups must .*\(2\). Got 1"):
        Dataset(IMAGES, torch.zeros(2).long(), ("a",), groups=("x",))


def test_255_is_ignored_in_masks_unless_it_is_a_class():
    masks = torch.tensor([[[0, 255]]], dtype=torch.uint8)
    Dataset(torch.zeros(1, 1, 1, 2), masks, ("a", "b"))
    assert default_ignore_index(masks, 255) == 255
    assert default_ignore_index(masks, 256) is None
    assert default_ignore_index(masks[0, 0], 2) is None  # labels, not masks
    assert default_ignore_index(masks.bool(), 2) is default_ignore_index(masks.float(), 2) is None
    assert default_ignore_index(masks.char(), 2) is None  # int8 has no 255
    assert not_ignored(masks, 255).tolist() == [[[True, False]]]
    assert not_ignored(masks, None).all()


@settings(deadline=None, max_examples=60)
@given(
    labels=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    fraction=st.floats(0.05, 0.95),
    seed=st.integers(0, 2**31),
)
def test_hold_out_takes_the_rounded_fraction_of_every_stratum(labels, fraction, seed):
    kept, held = hold_out(labels, range(len(labels)), fraction, seed)
    assert sorted(kept + held) == list(range(len(labels)))
    for label in set(labels):
        assert sum(labels[i] == label for i in held) == round(fraction * labels.count(label))


@settings(deadline=None, max_examples=60)
@given(units=st.lists(st.integers(0, 8), min_size=1, max_size=40), fraction=st.floats(0.05, 0.95))
def test_hold_out_keeps_equal_units_together(units, fraction):
    kept, held = hold_out(["all"] * len(units), units, fraction, seed=0)
    assert not {units[i] for i in kept} & {units[i] for i in held}
    assert len(held) <= round(fraction * len(units))


@pytest.mark.parametrize("fraction", [0, 1, -0.1, 2])
def test_fractions_outside_0_to_1(fraction):
    with pytest.raises(ValueError, match="between 0 and 1"):
        hold_out([0, 1], [0, 1], fraction, seed=0)


def test_split_validation_is_stratified_and_seeded_and_loads_again():
    data = load("digits")
    train, validation = split_validation(data, 0.1, seed=3)
    assert validation.split == "validation"
    assert len(train) + len(validation) == len(data)
    counts = torch.bincount(data.targets)
    assert torch.bincount(validation.targets).tolist() == [round(0.1 * n) for n in counts.tolist()]
    assert split_validation(data, 0.1, seed=4)[1].checksum != validation.checksum
    for part in (train, validation):
        assert load_recipe(part.recipe).checksum == part.checksum
    assert load_recipe(load("digits", split="test").recipe).split == "test"


def test_split_validation_by_groups_with_identical_images_on_one_side():
    scenes = load("shapes", groups=3, per_group=10, size=16)
    _, validation = split_validation(scenes, 0.25)
    assert [validation.groups.count(f"scene {g:03d}") for g in range(3)] == [2, 2, 2]
    images = torch.zeros(20, 1, 2, 2, dtype=torch.uint8)
    images[:, 0, 0, 0] = torch.arange(20) // 2  # ten pairs
    train, validation = split_validation(Dataset(images, torch.zeros(20).long(), ("a",)), 0.3)
    assert len(validation) == 6
    assert not set(train.images[:, 0, 0, 0].tolist()) & set(validation.images[:, 0, 0, 0].tolist())
    with pytest.raises(ValueError, match="both sides of 6"):
        split_validation(tiny(), 0.01)


def test_digits_are_embedded():
    train, test = load("digits"), load("digits", split="test")
    assert (len(train), len(test)) == (1438, 359)
    assert (int(train.images.min()), int(train.images.max())) == (0, 255)
    first = train.images[0, 0, 0, :6].tolist()  # scikit-learn's first row 0 0 5 13 9 1, of 16
    assert first == [round(v * 255 / 16) for v in (0, 0, 5, 13, 9, 1)]


@pytest.mark.parametrize("name", ["digits", "shapes"])
def test_the_registry_describes_what_is_loaded(name):
    info = DATASETS[name]
    for split, size in info.sizes.items():
        data = load(name, split=split)
        assert (len(data), tuple(data.images.shape[1:]), data.classes) == (size, info.shape, info.classes)
        assert (data.targets.ndim > 1) == info.dense


def test_names_splits_and_options_are_checked():
    with pytest.raises(ValueError, match="Did you mean 'cifar10'"):
        load("cifar")
    with pytest.raises(ValueError, match="Valid names: cifar10, svhn"):
        load("imagenet")
    with pytest.raises(ValueError, match=r"one of train, test. Got 'dev'"):
        load("digits", split="dev")
    with pytest.raises(TypeError, match="Did you mean 'groups'"):
        load("shapes", group=3)
    with pytest.raises(TypeError, match="^aaa must be an option of shapes"):
        load("shapes", zzz=1, mmm=2, aaa=3)
    with pytest.raises(TypeError, match="numbers, strings and lists"):
        load("shapes", size=torch.tensor(16))


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64, ">f4"])
def test_arrays(dtype):
    images = np.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5).astype(dtype)
    data = from_arrays(images, np.array([1, 0], np.int16))
    assert data.images.dtype == (torch.uint8 if dtype is np.uint8 else torch.float32)
    assert data.images.numpy().tolist() == images.tolist()
    assert data.classes == ("0", "1")
    assert data.recipe is None


def test_arrays_of_other_layouts_and_masks():
    grey = from_arrays(np.zeros((2, 4, 5), np.uint8), torch.tensor([0, 1]))
    assert grey.images.shape == (2, 1, 4, 5)
    last = np.arange(2 * 8 * 8 * 3, dtype=np.uint8).reshape(2, 8, 8, 3)
    data = from_arrays(last, [0, 1], layout="NHWC", classes=["cat", "dog"])
    assert data.images[1, 2, 3, 4] == last[1, 3, 4, 2]
    assert data.classes == ("cat", "dog")
    masks = np.zeros((2, 4, 4), np.uint8)
    masks[0, 0, 0], masks[1, 0, 0] = 1, 255
    data = from_arrays(np.zeros((2, 1, 4, 4), np.uint8), masks)
    assert data.classes == ("0", "1")
    assert data.targets.dtype == torch.uint8


def test_memory_is_shared_unless_the_array_is_read_only_or_runs_backwards():
    images = np.zeros((2, 1, 4, 4), np.uint8)
    from_arrays(images, [0, 0]).images[0] = 1
    assert images[0].min() == 1
    images.flags.writeable = False
    from_arrays(images, [0, 0]).images[1] = 1
    assert images[1].max() == 0
    images = np.arange(2 * 3 * 4 * 5, dtype=np.uint8).reshape(2, 3, 4, 5)
    data = from_arrays(images[:, ::-1, ::-1], np.array([0, 1])[::-1])
    assert (data.images.numpy() == images[:, ::-1, ::-1]).all()
    assert data.targets.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("images", "targets", "options", "error", "match"),
    [
        (np.full((1, 1, 2, 2), np.nan), [0], {}, ValueError, "finite"),
        (np.full((1, 1, 2, 2), 1e300), [0], {}, ValueError, "finite"),  # not as float32
        (np.zeros((1, 1, 2, 2)), [0.5], {}, TypeError, "integers"),
        (np.array([["a"]]), [0], {}, TypeError, "array of numbers"),
        (np.zeros((2, 32, 32, 3)), [0, 1], {}, ValueError, "layout='NHWC'"),
        (np.zeros((2, 3, 4, 4)), [0, 1], {"layout": "CHWN"}, ValueError, "'NCHW', 'NHWC'"),
        (np.zeros((2, 3, 4, 4)), [0, 1, 2], {}, ValueError, r"Got \(3,\)"),
        (np.zeros((2, 3, 4, 4)), [0, -1], {}, ValueError, "Got -1"),
    ],
)
def test_wrong_arrays(images, targets, options, error, match):
    with pytest.raises(error, match=match):
        from_arrays(images, targets, **options)


@pytest.mark.parametrize("label", [100_000, 2 * 10**7, 2**62])
def test_an_absurd_label_names_no_classes(label):
    """It used to make 20 million class names, in 37 seconds."""
    with pytest.raises(ValueError, match=f"below 100,000 .* Got {label}"):
        from_arrays(np.zeros((1, 1, 2, 2)), [label])
    assert len(from_arrays(np.zeros((1, 1, 2, 2)), [99_999]).classes) == 100_000


AS_AN_ORDINARY_USER = """
import os, sys
from PIL import Image
import cmcl.data, cmcl.data.dataset, cmcl.data.folder, cmcl.data.cifar10, cmcl.data.svhn
Image.init()
if os.geteuid() == 0:  # whom permissions do not bind; only now, because others may not read the modules above
    os.setgid(65534)
    os.setuid(65534)
for name, file in (("cifar10", "data_batch_2"), ("svhn", "train_32x32.mat"), ("folder", "x.png")):
    try:
        cmcl.data.load(name, root=f"{sys.argv[1]}/{name}")
    except (PermissionError, ValueError) as error:
        assert f"{file} must be readable. Got no read permission. Give it with: chmod u+r" in str(error), error
        print("explained")
"""


def test_missing_files_folders_and_files_without_read_permission(cifar, write_image, run_python):
    with tempfile.TemporaryDirectory() as name:  # unlike tmp_path, others may enter it
        root = Path(name)
        root.chmod(0o755)
        with pytest.raises(FileNotFoundError, match=r"train_32x32.mat must exist.*cmcl data fetch svhn"):
            load("svhn", root=root)
        batch = cifar.write(root / "cifar10") / "cifar-10-batches-py" / "data_batch_2"
        matrix = root / "svhn" / "svhn" / "train_32x32.mat"
        matrix.parent.mkdir(parents=True)
        matrix.touch()
        for path in (batch, matrix, write_image(root / "folder" / "a" / "x.png")):
            path.chmod(0)
        result = run_python(AS_AN_ORDINARY_USER, root)
        assert result.stdout == "explained\n" * 3, result.stderr
        batch.unlink()
        batch.mkdir()
        with pytest.raises(IsADirectoryError, match="must be a file. Got a folder"):
            load("cifar10", root=root / "cifar10")
