import numpy as np
import pytest
import torch
from PIL import Image

from cmcl.data import load
from cmcl.data.shapes import draw


@pytest.fixture
def icoseg(tmp_path, write_image, write_mask):
    """Ten landscape images in each of two groups, one upright, one too small."""
    root = tmp_path / "iCoseg"

    def write(group, name, size, seed):
        image = write_image(root / "images" / group / f"{name}.jpg", size, seed=seed)
        write_mask(root / "ground_truth" / group / f"{name}.png", size)
        return image

    for g, group in enumerate(("001 bears", "002 kites")):
        for i in range(10):
            write(group, f"{i}", (300, 500), seed=10 * g + i)
    write("001 bears", "upright", (500, 300), seed=77)
    write("002 kites", "small", (299, 500), seed=78)
    return root


def test_size_rule_and_split(tmp_path, icoseg):
    train, test = load("icoseg", root=tmp_path), load("icoseg", split="test", root=tmp_path)
    assert (len(train), len(test)) == (16, 4)
    assert test.groups == ("001 bears",) * 2 + ("002 kites",) * 2
    assert train.images.shape == (16, 3, 75, 125)
    assert train.targets.shape == (16, 75, 125)
    assert train.classes == ("background", "foreground")
    assert train.targets[0, 0].tolist() == [1] * 62 + [0] * 63
    both = [load("icoseg", split=split, root=tmp_path, orientation="both") for split in ("train", "test")]
    assert sum(map(len, both)) == 21


def test_split_is_seeded(tmp_path, icoseg):
    first = load("icoseg", split="test", root=tmp_path)
    assert load("icoseg", split="test", root=tmp_path).checksum == first.checksum
    others = {load("icoseg", split="test", root=tmp_path, seed=seed).checksum for seed in range(1, 4)}
    assert others != {first.checksum}


def test_identical_images_stay_on_one_side(tmp_path, icoseg):
    folder = icoseg / "images" / "001 bears"
    for i in range(0, 10, 2):
        (folder / f"{i + 1}.jpg").write_bytes((folder / f"{i}.jpg").read_bytes())
    for seed in range(5):
        sides = [
            load("icoseg", split=split, root=tmp_path, seed=seed, size=(6, 10)) for split in ("train", "test")
        ]
        train, test = ({image.numpy().tobytes() for image in side.images} for side in sides)
        assert len(sides[1]) == 4
        assert not train & test


def test_a_mask_of_another_size(tmp_path, icoseg, write_mask):
    write_mask(icoseg / "ground_truth" / "002 kites" / "3.png", (300, 499))
    with pytest.raises(
        ValueError, match=r"3.png must have the size of its image. Got \(300, 499\) and \(300, 500\)"
    ):
        load("icoseg", root=tmp_path)


def test_empty_images_and_missing_masks_are_named_together(tmp_path, icoseg):
    (icoseg / "images" / "001 bears" / "4.jpg").write_bytes(b"")
    (icoseg / "ground_truth" / "002 kites" / "5.png").unlink()
    with pytest.raises(ValueError, match="Got 2 that are not") as caught:
        load("icoseg", root=tmp_path)
    assert "4.jpg is empty" in str(caught.value)
    assert "5.png must exist" in str(caught.value)


def test_a_missing_set_and_wrong_options(tmp_path, icoseg):
    with pytest.raises(FileNotFoundError, match="chenlab.ece.cornell.edu"):
        load("icoseg", root=tmp_path / "nowhere")
    with pytest.raises(ValueError, match="'landscape' or 'both'. Got 'portrait'"):
        load("icoseg", root=tmp_path, orientation="portrait")
    for image in icoseg.glob("images/*/*"):
        if image.stem != "small":
            image.unlink()
    with pytest.raises(ValueError, match=r"at least \(300, 500\)"):
        load("icoseg", root=tmp_path)


def test_shapes_depend_on_the_seed_alone():
    first = load("shapes", groups=4, per_group=5, size=24)
    assert load("shapes", groups=4, per_group=5, size=24).checksum == first.checksum
    assert load("shapes", groups=4, per_group=5, size=24, seed=1).checksum != first.checksum
    assert (len(first), len(load("shapes", groups=4, per_group=5, size=24, split="test"))) == (16, 4)


def test_shapes_have_both_classes_and_many_colours():
    data = load("shapes", groups=10, per_group=3, size=(32, 48))
    assert data.images.shape[1:] == (3, 32, 48)
    share = data.targets.float().mean((1, 2))
    assert float(share.min()) > 0.01
    assert float(share.max()) < 0.9
    for image in data.images:
        assert len(image.flatten(1).T.unique(dim=0)) > 300


def test_a_scene_does_not_depend_on_the_others():
    image, mask = draw(0, 2, 1, (24, 24))
    data = load("shapes", groups=3, per_group=2, size=24)
    assert (data.images[5].numpy() == image).all()
    assert (data.targets[5].numpy() == mask).all()


def test_foreground_differs_from_background():
    """The object is painted where the mask says: inside and outside have different colours."""
    for group in range(10):
        image, mask = draw(3, group, 0, (48, 48))
        inside, outside = image[:, mask == 1].mean(1), image[:, mask == 0].mean(1)
        assert np.abs(inside - outside).max() > 8


def test_wrong_sizes_of_shapes():
    with pytest.raises(ValueError, match="must be positive. Got 0 and 20"):
        load("shapes", groups=0)
    with pytest.raises(ValueError, match="at least 3 for a test split. Got 2"):
        load("shapes", groups=1, per_group=2, size=16, split="test")
    for size in (7, (8, 7), (64, 27)):
        with pytest.raises(ValueError, match=r"at least 8 each way.* Got \("):
            load("shapes", size=size)


@pytest.mark.parametrize("size", ["8,8", "75", [0, 5], [5], [5, 6, 7], 0, -3, 7.5, [8.0, 8.0], True, {}])
@pytest.mark.parametrize("name", ["shapes", "icoseg", "folder"])
def test_sizes_are_read_alike(tmp_path, icoseg, name, size):
    with pytest.raises(ValueError, match="size must be .height, width., or one number for squares") as caught:
        load(name, root=tmp_path, size=size)
    assert f"Got {size!r}. Write size=[75,125] or size=64." in str(caught.value)


def test_one_number_is_a_square_in_icoseg_too(tmp_path, icoseg):
    assert load("icoseg", root=tmp_path, size=10).images.shape[2:] == (10, 10)


def test_shapes_and_digits_stay_the_same_from_version_to_version():
    """A published number names its data by these."""
    shapes = load("shapes", groups=2, per_group=3, size=16)
    assert shapes.checksum[:16] == "e189158d10fb19cf"
    assert load("digits").checksum[:16] == "ced7a35041ea5b65"


def test_bicubic_images_and_nearest_masks(tmp_path, icoseg):
    path = icoseg / "images" / "001 bears" / "0.jpg"
    with Image.open(path) as image:
        expected = np.asarray(image.resize((125, 75), Image.Resampling.BICUBIC)).transpose(2, 0, 1)
    every = torch.cat([load("icoseg", split=split, root=tmp_path).images for split in ("train", "test")])
    assert any((image.numpy() == expected).all() for image in every)
