import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cmcl.data import Dataset, load, load_recipe, split_validation
from cmcl.data.dataset import evenly_spaced, hold_out, stratified_subset


def tiny(n=6, classes=3):
    images = torch.arange(n * 4, dtype=torch.uint8).view(n, 1, 2, 2)
    return Dataset(images, torch.arange(n) % classes, tuple("abc"[:classes]))


def test_length_items_slices_and_subsets():
    data = tiny()
    assert len(data) == 6
    image, target = data[4]
    assert image.tolist() == [[[16, 17], [18, 19]]]
    assert target == 1
    assert data[1:3].targets.tolist() == [1, 2]
    assert data[::-2].targets.tolist() == [2, 0, 1]
    assert data.subset([5, 0]).images[:, 0, 0, 0].tolist() == [20, 0]
    assert data.subset(data.targets == 1).images[:, 0, 0, 0].tolist() == [4, 16]
    assert len(data.subset([])) == 0


def test_evenly_spaced_examples():
    targets = torch.arange(4).repeat_interleave(25)  # sorted by class, as folders are
    data = Dataset(torch.zeros(100, 1, 2, 2, dtype=torch.uint8), targets, ("a", "b", "c", "d"))
    assert evenly_spaced(data, 8).targets.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [len(evenly_spaced(data, count)) for count in (1, 7, 99)] == [1, 7, 99]
    assert evenly_spaced(data, None) is data
    assert evenly_spaced(data, 100) is evenly_spaced(data, 1000) is data


def test_subset_carries_its_groups():
    data = Dataset(torch.zeros(3, 1, 2, 2), torch.zeros(3, dtype=torch.long), ("a",), groups=("x", "y", "z"))
    assert data.subset([2, 0]).groups == ("z", "x")


def test_checksum_is_of_the_content_alone():
    data = tiny()
    same = Dataset(data.images.clone(), data.targets.clone(), ("x", "y", "z"), "test", "elsewhere")
    assert data.checksum == same.checksum
    changed = data.images.clone()
    changed[0, 0, 0, 0] += 1
    assert Dataset(changed, data.targets, data.classes).checksum != data.checksum
    assert Dataset(data.images, data.targets.flip(0), data.classes).checksum != data.checksum
    assert Dataset(data.images.view(6, 4, 1, 1), data.targets, data.classes).checksum != data.checksum


@pytest.mark.parametrize(
    ("images", "targets", "classes", "error", "match"),
    [
        (torch.zeros(2, 3), torch.zeros(2).long(), 2, ValueError, r"shape \(N,C,H,W\). Got \(2, 3\)"),
        (torch.zeros(2, 1, 2, 2).int(), torch.zeros(2).long(), 2, TypeError, "uint8 or floating"),
        (torch.zeros(2, 1, 2, 2), torch.zeros(3).long(), 2, ValueError, r"targets .* Got \(3,\)"),
        (torch.zeros(2, 1, 2, 2), torch.zeros(2), 2, TypeError, "int64"),
        (torch.zeros(2, 1, 2, 2), torch.tensor([0, 2]), 2, ValueError, "between 0 and 1 .* Got 2"),
        (torch.zeros(2, 1, 2, 2), torch.tensor([-1, 0]), 2, ValueError, "Got -1"),
        (torch.zeros(1, 1, 2, 2), torch.full((1, 2, 2), 7).byte(), 2, ValueError, "Got 7"),
    ],
)
def test_wrong_values_are_refused(images, targets, classes, error, match):
    with pytest.raises(error, match=match):
        Dataset(images, targets, tuple(map(str, range(classes))))


def test_ignored_pixels_are_no_class():
    Dataset(torch.zeros(1, 1, 2, 2), torch.full((1, 2, 2), 255, dtype=torch.uint8), ("a", "b"))


def test_groups_must_fit():
    with pytest.raises(ValueError, match=r"\(2\). Got 1"):
        Dataset(torch.zeros(2, 1, 2, 2), torch.zeros(2).long(), ("a",), groups=("x",))


@settings(deadline=None, max_examples=60)
@given(
    labels=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    fraction=st.floats(0.05, 0.95),
    seed=st.integers(0, 2**31),
)
def test_hold_out_takes_the_rounded_share_of_every_stratum(labels, fraction, seed):
    kept, held = hold_out(labels, range(len(labels)), fraction, seed)
    assert sorted(kept + held) == list(range(len(labels)))
    for label in set(labels):
        assert sum(labels[i] == label for i in held) == round(fraction * labels.count(label))


@settings(deadline=None, max_examples=60)
@given(units=st.lists(st.integers(0, 8), min_size=1, max_size=40), fraction=st.floats(0.05, 0.95))
def test_hold_out_never_parts_equal_units(units, fraction):
    kept, held = hold_out(["all"] * len(units), units, fraction, seed=0)
    assert not {units[i] for i in kept} & {units[i] for i in held}
    assert len(held) <= round(fraction * len(units))


@pytest.mark.parametrize("fraction", [0, 1, -0.1, 2])
def test_hold_out_refuses_fractions_outside_0_to_1(fraction):
    with pytest.raises(ValueError, match="between 0 and 1"):
        hold_out([0, 1], [0, 1], fraction, seed=0)


def test_split_validation_is_stratified_and_seeded():
    data = load("digits")
    train, validation = split_validation(data, 0.1, seed=3)
    assert validation.split == "validation"
    assert len(train) + len(validation) == len(data)
    counts = torch.bincount(data.targets)
    assert torch.bincount(validation.targets).tolist() == [round(0.1 * n) for n in counts.tolist()]
    assert split_validation(data, 0.1, seed=3)[1].checksum == validation.checksum
    assert split_validation(data, 0.1, seed=4)[1].checksum != validation.checksum


def test_split_validation_keeps_identical_images_together():
    images = torch.zeros(20, 1, 2, 2, dtype=torch.uint8)
    images[:, 0, 0, 0] = torch.arange(20) // 2  # ten pairs
    train, validation = split_validation(Dataset(images, torch.zeros(20).long(), ("a",)), 0.3)
    assert len(validation) == 6
    assert not set(train.images[:, 0, 0, 0].tolist()) & set(validation.images[:, 0, 0, 0].tolist())


def test_split_validation_of_groups():
    data = load("shapes", groups=3, per_group=10, size=16)
    _, validation = split_validation(data, 0.25)
    assert [validation.groups.count(f"scene {g:03d}") for g in range(3)] == [2, 2, 2]


def test_split_validation_must_leave_both_sides():
    with pytest.raises(ValueError, match="both sides of 6"):
        split_validation(tiny(), 0.01)


def test_recipe_loads_the_same_part_again():
    _, validation = split_validation(load("digits"), 0.2, seed=1)
    assert load_recipe(validation.recipe).checksum == validation.checksum
    assert load_recipe(load("digits", split="test").recipe).split == "test"


def test_digits_are_embedded():
    train, test = load("digits"), load("digits", split="test")
    assert (len(train), len(test)) == (1438, 359)
    assert train.images.shape[1:] == (1, 8, 8)
    assert (int(train.images.min()), int(train.images.max())) == (0, 255)
    first = train.images[0, 0, 0, :6].tolist()  # scikit-learn's first row 0 0 5 13 9 1, of 16
    assert first == [round(v * 255 / 16) for v in (0, 0, 5, 13, 9, 1)]


def test_names_are_checked():
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


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64, ">f4"])
def test_arrays(dtype):
    images = np.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5).astype(dtype)
    data = load("arrays", images=images, targets=np.array([1, 0], np.int16))
    assert data.images.dtype == (torch.uint8 if dtype is np.uint8 else torch.float32)
    assert data.images.numpy().tolist() == images.tolist()
    assert data.classes == ("0", "1")
    assert data.recipe is None


def test_arrays_of_other_layouts():
    grey = load("arrays", images=np.zeros((2, 4, 5), np.uint8), targets=torch.tensor([0, 1]))
    assert grey.images.shape == (2, 1, 4, 5)
    last = np.arange(2 * 8 * 8 * 3, dtype=np.uint8).reshape(2, 8, 8, 3)
    data = load("arrays", images=last, targets=[0, 1], layout="NHWC", classes=["cat", "dog"])
    assert data.images[1, 2, 3, 4] == last[1, 3, 4, 2]
    assert data.classes == ("cat", "dog")


def test_arrays_of_masks():
    masks = np.zeros((2, 4, 4), np.uint8)
    masks[0, 0, 0] = 1
    masks[1, 0, 0] = 255
    data = load("arrays", images=np.zeros((2, 1, 4, 4), np.uint8), targets=masks)
    assert data.classes == ("0", "1")
    assert data.targets.dtype == torch.uint8


def test_a_read_only_array_is_copied():
    images = np.zeros((2, 1, 4, 4), np.uint8)
    images.flags.writeable = False
    load("arrays", images=images, targets=[0, 0]).images[0] = 1
    assert images.max() == 0


def test_arrays_that_run_backwards():
    images = np.arange(2 * 3 * 4 * 5, dtype=np.uint8).reshape(2, 3, 4, 5)
    data = load("arrays", images=images[:, ::-1, ::-1], targets=np.array([0, 1])[::-1])
    assert (data.images.numpy() == images[:, ::-1, ::-1]).all()
    assert data.targets.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("images", "targets", "options", "error", "match"),
    [
        (np.full((1, 1, 2, 2), np.nan), [0], {}, ValueError, "finite"),
        (np.zeros((1, 1, 2, 2)), [0.5], {}, TypeError, "must be integers"),
        (np.array([["a"]]), [0], {}, TypeError, "array of numbers"),
        (np.zeros((2, 32, 32, 3)), [0, 1], {}, ValueError, "layout='NHWC'"),
        (np.zeros((2, 3, 4, 4)), [0, 1], {"layout": "CHWN"}, ValueError, "'NCHW' or 'NHWC'"),
        (np.zeros((2, 3, 4, 4)), [0, 1, 2], {}, ValueError, r"Got \(3,\)"),
    ],
)
def test_wrong_arrays_are_refused(images, targets, options, error, match):
    with pytest.raises(error, match=match):
        load("arrays", images=images, targets=targets, **options)


class TestStratifiedSubset:
    def test_drawn_evenly(self):
        train = load("digits")
        part = stratified_subset(train, 300)
        assert part.targets.bincount().tolist() == [30] * 10
        assert stratified_subset(train, 304).targets.bincount().max() == 31
        assert stratified_subset(train, 300).checksum == part.checksum
        originals = {image.numpy().tobytes() for image in train.images}
        chosen = [image.numpy().tobytes() for image in part.images]
        assert originals >= set(chosen)

    def test_the_smaller_is_part_of_the_larger(self):
        train = load("digits")
        small, large = (
            {(i.numpy().tobytes(), int(t)) for i, t in zip(p.images, p.targets, strict=True)}
            for p in (stratified_subset(train, 50), stratified_subset(train, 120))
        )
        assert small <= large

    def test_all(self):
        train = load("digits")
        assert stratified_subset(train, len(train)).checksum == train.checksum
        with pytest.raises(ValueError, match="1439"):
            stratified_subset(train, 1439)

    def test_groups_of_segmentation(self):
        train = load("shapes", groups=4, per_group=5, size=16)
        groups = stratified_subset(train, 8).groups
        assert sorted(groups) == sorted([*set(train.groups)] * 2)
