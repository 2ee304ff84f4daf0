import numpy as np
import pytest
import torch
from PIL import Image

from cmcl.data import load


@pytest.fixture
def icoseg(tmp_path, write_image, write_mask):
    """Ten landscape images in each of two groups, one portrait, one too small."""
    root = tmp_path / "iCoseg"

    def write(group, name, size, seed):
        write_image(root / "images" / group / f"{name}.jpg", size, seed=seed)
        write_mask(root / "ground_truth" / group / f"{name}.png", size)

    for g, group in enumerate(("001 bears", "002 kites")):
        for i in range(10):
            write(group, f"{i}", (300, 500), seed=10 * g + i)
    write("001 bears", "portrait", (500, 300), seed=77)
    write("002 kites", "small", (299, 500), seed=78)
    return root


def both(root, **options):
    return [load("icoseg", split=split, root=root, **options) for split in ("train", "test")]


def test_size_rule_split_and_resizing(tmp_path, icoseg):
    train, test = both(tmp_path)
    assert (len(train), len(test)) == (16, 4)
    assert test.groups == ("001 bears",) * 2 + ("002 kites",) * 2
    assert train.images.shape == (16, 3, 75, 125)
    assert train.classes == ("background", "foreground")
    assert train.targets[0, 0].tolist() == [1] * 62 + [0] * 63  # masks by the nearest pixel
    with Image.open(icoseg / "images" / "001 bears" / "0.jpg") as image:
        expected = np.asarray(image.resize((125, 75), Image.Resampling.BICUBIC)).transpose(2, 0, 1)
    assert any((image.numpy() == expected).all() for image in torch.cat([train.images, test.images]))
    assert sum(map(len, both(tmp_path, orientation="both", size=10))) == 21
    assert load("icoseg", root=tmp_path, size=10).images.shape[2:] == (10, 10)


def test_the_split_is_seeded_and_identical_images_stay_on_one_side(tmp_path, icoseg):
    folder = icoseg / "images" / "001 bears"
    for i in range(0, 10, 2):
        (folder / f"{i + 1}.jpg").write_bytes((folder / f"{i}.jpg").read_bytes())
    tests = set()
    for seed in (0, 1, 2, 0):
        train, test = both(tmp_path, seed=seed, size=(6, 10))
        assert len(test) == 4
        assert not {x.numpy().tobytes() for x in train.images} & {x.numpy().tobytes() for x in test.images}
        tests.add(test.checksum)
    assert len(tests) == 3


def test_all_damaged_files_are_named_together(tmp_path, icoseg, write_mask):
    (icoseg / "images" / "001 bears" / "4.jpg").write_bytes(b"")
    (icoseg / "ground_truth" / "002 kites" / "5.png").unlink()
    write_mask(icoseg / "ground_truth" / "002 kites" / "3.png", (300, 499))
    with pytest.raises(ValueError, match="Got 3 that are not") as caught:
        load("icoseg", root=tmp_path)
    assert "4.jpg is empty" in str(caught.value)
    assert "5.png must exist" in str(caught.value)
    assert "3.png must have the size of its image. Got (300, 499) and (300, 500)" in str(caught.value)


def test_a_missing_dataset_and_wrong_options(tmp_path, icoseg):
    with pytest.raises(FileNotFoundError, match=r"chenlab\.ece\.cornell\.edu"):
        load("icoseg", root=tmp_path / "nowhere")
    with pytest.raises(ValueError, match="'landscape', 'both'. Got 'portrait'"):
        load("icoseg", root=tmp_path, orientation="portrait")
    for image in icoseg.glob("images/*/*"):
        if image.stem != "small":
            image.unlink()
    with pytest.raises(ValueError, match=r"at least \(300, 500\)"):
        load("icoseg", root=tmp_path)


@pytest.mark.parametrize("size", ["8,8", "75", [0, 5], [5], [5, 6, 7], 0, -3, 7.5, [8.0, 8.0], True, {}])
def test_sizes_are_checked_alike(tmp_path, icoseg, size):
    for name in ("shapes", "icoseg", "folder"):
        with pytest.raises(ValueError, match="size must be .height, width., or one number") as caught:
            load(name, root=tmp_path, size=size)
        assert f"Got {size!r}. Write size=[75,125] or size=64." in str(caught.value)
