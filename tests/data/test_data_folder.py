import numpy as np
import pytest
import torch
from PIL import Image

from cmcl.data import load
from cmcl.data.images import stored_size

LOSSLESS = {"webp": {"lossless": True, "exact": True}}  # exact: hidden colours too


def test_class_folders(tmp_path, write_image):
    for i in range(3):
        write_image(tmp_path / "dog" / f"{i}.png", seed=i)
        write_image(tmp_path / "cat" / f"{i}.png", seed=9 + i)
    data = load("folder", root=tmp_path)
    assert data.classes == ("cat", "dog")
    assert data.targets.tolist() == [0, 0, 0, 1, 1, 1]
    expected = np.random.default_rng(9).integers(0, 256, (8, 10, 3), dtype=np.uint8)
    assert (data.images[0].permute(1, 2, 0).numpy() == expected).all()


def test_hidden_and_other_files_are_left_out(tmp_path, write_image):
    write_image(tmp_path / "cat" / "a.PNG")
    (tmp_path / "cat" / "notes.txt").write_text("no image")
    (tmp_path / "cat" / ".DS_Store").write_bytes(b"x")
    (tmp_path / ".git").mkdir()
    assert len(load("folder", root=tmp_path)) == 1


def test_splits_share_the_numbers_of_the_classes(tmp_path, write_image):
    for name in ("ant", "bee", "cow"):
        write_image(tmp_path / "train" / name / "x.png")
    write_image(tmp_path / "test" / "cow" / "y.png")
    test = load("folder", split="test", root=tmp_path)
    assert test.targets.tolist() == [2]
    write_image(tmp_path / "test" / "dog" / "y.png")
    with pytest.raises(ValueError, match="classes that train/ lacks: dog"):
        load("folder", split="test", root=tmp_path)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "1", "CMYK", "I;16", "I", "F", "YCbCr"])
def test_every_mode_that_pillow_reads(tmp_path, mode):
    grey = np.tile(np.linspace(0, 255, 16).astype(np.uint8), (8, 1))
    image = Image.fromarray(grey)
    if mode == "I;16":
        image = Image.fromarray(grey.astype(np.uint16) * 257)
    elif mode == "I":
        image = Image.fromarray(grey.astype(np.int32) * 257)
    else:
        image = image.convert(mode, dither=Image.Dither.NONE)
    (tmp_path / "grey").mkdir()
    image.save(tmp_path / "grey" / f"x.{'tiff' if mode in ('CMYK', 'I', 'F', 'YCbCr') else 'png'}")
    pixels = load("folder", root=tmp_path).images[0].int()
    assert pixels.shape == (3, 8, 16)
    tolerance = 128 if mode == "1" else 3
    assert (pixels - torch.from_numpy(grey).int()).abs().max() <= tolerance


def test_a_palette_with_transparent_colours(tmp_path):
    image = Image.fromarray(np.array([[0, 1]], np.uint8), mode=None).convert("P")
    image.putpalette([255, 0, 0, 0, 0, 255])
    (tmp_path / "a").mkdir()
    image.save(tmp_path / "a" / "x.png", transparency=bytes([0, 255]))
    assert load("folder", root=tmp_path).images[0, :, 0, 1].tolist() == [0, 0, 255]


@pytest.mark.parametrize("ending", ["png", "webp", "tiff"])
def test_what_is_transparent_is_white(tmp_path, ending):
    """The red of the first pixel is hidden; half of the second shows."""
    (tmp_path / "a").mkdir()
    pixels = np.array([[[255, 0, 0, 0], [0, 0, 0, 128], [0, 0, 255, 255]]], np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a" / f"x.{ending}", **LOSSLESS.get(ending, {}))
    images = load("folder", root=tmp_path).images
    assert images[0, :, 0].T.tolist() == [[255, 255, 255], [127, 127, 127], [0, 0, 255]]
    assert load("folder", root=tmp_path, mode="L").images.flatten().tolist() == [255, 127, 29]


@pytest.mark.parametrize(("mode", "hidden"), [("L", 7), ("RGB", (7, 7, 7)), ("P", 7)])
def test_a_colour_that_is_transparent_is_white(tmp_path, mode, hidden):
    image = Image.new(mode, (2, 1), hidden)
    if mode == "P":
        image.putpalette([7] * 24 + [9] * 3)
    image.putpixel((1, 0), {"L": 9, "RGB": (9, 9, 9), "P": 8}[mode])
    (tmp_path / "a").mkdir()
    image.save(tmp_path / "a" / "x.png", transparency=hidden)
    assert load("folder", root=tmp_path).images[0, 0].tolist() == [[255, 9]]


@pytest.mark.parametrize("kind", ["RGBA", "LA", "P"])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_an_opaque_picture_is_what_pillow_makes_of_it(tmp_path, kind, mode):
    """To the bit: so checksums of data sets do not depend on how transparency is treated."""
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    pixels[:4] = np.arange(256, dtype=np.uint8).reshape(4, 64, 1)
    image = Image.fromarray(pixels).convert("L" if kind == "LA" else "RGB").convert(kind)
    (tmp_path / "a").mkdir()
    image.save(tmp_path / "a" / "x.png")
    expected = np.array(image.convert("RGB").convert(mode)).reshape(64, 64, -1)
    assert (load("folder", root=tmp_path, mode=mode).images[0].permute(1, 2, 0).numpy() == expected).all()


def test_grey_on_request(tmp_path, write_image):
    write_image(tmp_path / "a" / "x.png")
    assert load("folder", root=tmp_path, mode="L").images.shape == (1, 1, 8, 10)
    with pytest.raises(ValueError, match="'RGB' or 'L'. Got 'rgb'"):
        load("folder", root=tmp_path, mode="rgb")


def test_photos_are_turned_upright(tmp_path):
    image = Image.fromarray(np.array([[0, 255], [0, 255]], np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6  # turned a quarter: the left side is really the top
    (tmp_path / "a").mkdir()
    image.save(tmp_path / "a" / "x.png", exif=exif)
    assert load("folder", root=tmp_path, mode="L").images[0, 0].tolist() == [[0, 0], [255, 255]]


def test_sizes_must_agree_or_be_given(tmp_path, write_image):
    write_image(tmp_path / "a" / "x.png", size=(8, 10))
    write_image(tmp_path / "a" / "y.png", size=(20, 6))
    with pytest.raises(ValueError, match=r"Got \(8, 10\) and \(20, 6\).*Pass size="):
        load("folder", root=tmp_path)
    assert load("folder", root=tmp_path, size=(5, 7)).images.shape == (2, 3, 5, 7)
    assert load("folder", root=tmp_path, size=4).images.shape == (2, 3, 4, 4)
    with pytest.raises(ValueError, match="above 0. Got 0"):
        load("folder", root=tmp_path, size=0)


def test_images_are_resized_bicubically_as_pillow_does(tmp_path, write_image):
    path = write_image(tmp_path / "a" / "x.png", size=(40, 50))
    with Image.open(path) as image:
        expected = np.asarray(image.resize((9, 7), Image.Resampling.BICUBIC))
    pixels = load("folder", root=tmp_path, size=(7, 9)).images[0].permute(1, 2, 0).numpy()
    assert (pixels == expected).all()


def test_all_broken_files_are_named_at_once(tmp_path, write_image):
    write_image(tmp_path / "a" / "good.png")
    cut = write_image(tmp_path / "a" / "cut.png", size=(60, 60))
    cut.write_bytes(cut.read_bytes()[:2000])
    (tmp_path / "a" / "empty.jpg").touch()
    (tmp_path / "a" / "text.jpg").write_text("hello")
    with pytest.raises(ValueError, match="Got 3 that are not") as caught:
        load("folder", root=tmp_path)
    assert "cut.png is damaged" in str(caught.value)
    assert "empty.jpg is empty" in str(caught.value)
    assert "text.jpg is not an image" in str(caught.value)


def test_too_large_is_not_damaged(tmp_path, write_image, monkeypatch):
    write_image(tmp_path / "a" / "x.png", size=(8, 10))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 39)
    limit = r"x.png is too large \(Image size \(80 pixels\) exceeds limit of 78 pixels\). Make it smaller"
    with pytest.raises(ValueError, match=limit):
        load("folder", root=tmp_path)


def test_the_stored_size_is_known_without_the_pixels(tmp_path, write_image):
    path = write_image(tmp_path / "x.png", size=(60, 50))
    path.write_bytes(path.read_bytes()[:200])
    assert stored_size(path) == (60, 50)


def test_no_images_and_no_folder(tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(ValueError, match="Got no images in a. Lay it out as"):
        load("folder", root=tmp_path)
    with pytest.raises(FileNotFoundError, match="must hold a folder test/"):
        load("folder", split="test", root=tmp_path)
    with pytest.raises(FileNotFoundError, match="must hold a folder train/"):
        load("folder", root=tmp_path / "nowhere")


@pytest.mark.parametrize("value", [1, 255])
def test_images_with_masks(tmp_path, write_image, write_mask, value):
    for name in ("a", "b"):
        write_image(tmp_path / "images" / f"{name}.jpg", quality=95)
        write_mask(tmp_path / "masks" / f"{name}.png", value=value)
    data = load("folder", root=tmp_path)
    assert data.classes == ("background", "foreground")
    assert data.targets.dtype == torch.uint8
    assert data.targets[0, 0].tolist() == [1] * 5 + [0] * 5
    assert load("folder", root=tmp_path, size=(4, 20)).targets[1, 2].tolist() == [1] * 10 + [0] * 10


def test_masks_in_groups(tmp_path, write_image, write_mask):
    for group in ("sea", "land"):
        write_image(tmp_path / "images" / group / "x.png")
        write_mask(tmp_path / "masks" / group / "x.png")
    assert load("folder", root=tmp_path).groups == ("land", "sea")


def test_masks_of_class_numbers(tmp_path, write_image, write_mask):
    write_image(tmp_path / "images" / "x.png")
    mask = write_mask(tmp_path / "masks" / "x.png", value=2)
    with pytest.raises(ValueError, match=r"x.png must hold 0 and 1, or 0 and 255. Got 2. Name all classes"):
        load("folder", root=tmp_path)
    data = load("folder", root=tmp_path, classes=["sky", "sea", "ship"])
    assert data.targets.unique().tolist() == [0, 2]
    pixels = np.zeros((8, 10), np.uint8)
    pixels[0] = 255
    pixels[1] = 1
    Image.fromarray(pixels).save(mask)
    targets = load("folder", root=tmp_path, classes=["sky", "sea"]).targets[0]
    assert targets[:3, 0].tolist() == [255, 1, 0]


def test_black_and_white_masks_with_named_classes(tmp_path, write_image, write_mask):
    for name in ("x", "y"):
        write_image(tmp_path / "images" / f"{name}.png")
        write_mask(tmp_path / "masks" / f"{name}.png", value=255)
    classes = {"classes": ["sky", "ship"]}
    assert load("folder", root=tmp_path, **classes).targets.unique().tolist() == [0, 1]
    write_mask(tmp_path / "masks" / "y.png", value=1)  # class numbers after all: white is to be ignored
    assert load("folder", root=tmp_path, **classes).targets.unique().tolist() == [0, 1, 255]


def test_masks_with_palettes(tmp_path, write_image):
    """Two colours mean what they look like; with named classes, the numbers count."""
    write_image(tmp_path / "images" / "x.png", size=(1, 2))
    mask = Image.fromarray(np.array([[0, 1]], np.uint8))
    mask.putpalette([255, 255, 255, 0, 0, 0])  # white comes first
    (tmp_path / "masks").mkdir()
    mask.save(tmp_path / "masks" / "x.png")
    assert load("folder", root=tmp_path).targets.tolist() == [[[1, 0]]]
    assert load("folder", root=tmp_path, classes=["a", "b"]).targets.tolist() == [[[0, 1]]]


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P", "CMYK", "YCbCr"])
@pytest.mark.parametrize("colour", [(255, 0, 0), (255, 255, 255)])
def test_masks_of_black_and_one_other_colour(tmp_path, write_image, mode, colour):
    write_image(tmp_path / "images" / "x.png", size=(1, 2))
    picture = Image.fromarray(np.array([[colour, (0, 0, 0)]], np.uint8)).convert(mode)
    (tmp_path / "masks").mkdir()
    picture.save(tmp_path / "masks" / ("x.png" if mode in {"RGB", "RGBA", "P"} else "x.tiff"))
    assert load("folder", root=tmp_path).targets.tolist() == [[[1, 0]]]


@pytest.mark.parametrize(
    ("pixels", "message"),
    [
        ([(255, 0, 0), (0, 255, 0)], r"black and one other colour. Got .* Draw the background black"),
        ([(255, 0, 0, 0), (255, 0, 0, 255)], "black and one other colour"),  # which one is meant?
        ([(0, 0, 0), (255, 0, 0), (0, 255, 0)], "0 and 1, or 0 and 255. Got 76"),
        ([(0, 0, 0), (2, 2, 2)], "0 and 1, or 0 and 255. Got 2"),  # the number of a class
    ],
)
def test_masks_of_other_colours(tmp_path, write_image, pixels, message):
    write_image(tmp_path / "images" / "x.png", size=(1, len(pixels)))
    (tmp_path / "masks").mkdir()
    Image.fromarray(np.array([pixels], np.uint8)).save(tmp_path / "masks" / "x.png")
    with pytest.raises(ValueError, match=f"x.png must hold {message}"):
        load("folder", root=tmp_path)


def test_a_palette_without_black(tmp_path, write_image):
    write_image(tmp_path / "images" / "x.png", size=(1, 2))
    mask = Image.fromarray(np.array([[0, 1]], np.uint8))
    mask.putpalette([255, 0, 0, 0, 0, 255])
    (tmp_path / "masks").mkdir()
    mask.save(tmp_path / "masks" / "x.png")
    with pytest.raises(ValueError, match="x.png must hold black and one other colour"):
        load("folder", root=tmp_path)


@pytest.mark.parametrize(("kind", "ending"), [(np.uint16, "png"), (np.int32, "tiff"), (np.float32, "tiff")])
def test_masks_of_large_numbers(tmp_path, write_image, kind, ending):
    write_image(tmp_path / "images" / "x.png", size=(1, 3))
    (tmp_path / "masks").mkdir()

    def read(*values, **options):
        Image.fromarray(np.array([values], kind)).save(tmp_path / "masks" / f"x.{ending}")
        return load("folder", root=tmp_path, **options).targets.tolist()

    classes = {"classes": ["a", "b", "c"]}
    assert read(0, 1, 1) == [[[0, 1, 1]]]
    assert read(0, 65535, 65535) == [[[0, 1, 1]]]
    assert read(0, 1, 2, **classes) == [[[0, 1, 2]]]
    assert read(255, 65535, 2, **classes) == [[[255, 255, 2]]]
    with pytest.raises(ValueError, match="x.* must hold class numbers 0 to 2. Got 300"):
        read(0, 1, 300, **classes)
    with pytest.raises(ValueError, match="x.* must hold 0 and 1, or 0 and 255. Got 300"):
        read(0, 300, 300)
    with pytest.raises(ValueError, match="x.* must hold class numbers 0 to 254. Got 300"):
        read(0, 1, 300, classes=[str(i) for i in range(400)])  # a mask is kept in bytes


def test_a_wrong_value_is_seen_before_resizing_loses_it(tmp_path, write_image):
    write_image(tmp_path / "images" / "x.png", size=(9, 9))
    pixels = np.zeros((9, 9), np.uint8)
    pixels[0, 0] = 7
    (tmp_path / "masks").mkdir()
    Image.fromarray(pixels).save(tmp_path / "masks" / "x.png")
    with pytest.raises(ValueError, match="x.png must hold 0 and 1, or 0 and 255. Got 7"):
        load("folder", root=tmp_path, size=3)


def test_two_files_of_one_name(tmp_path, write_image, write_mask):
    write_image(tmp_path / "images" / "x.png")
    write_mask(tmp_path / "masks" / "x.png")
    extra = write_mask(tmp_path / "masks" / "x.bmp")
    with pytest.raises(ValueError, match="masks must hold one file of each name. Got x.bmp and x.png"):
        load("folder", root=tmp_path)
    extra.unlink()
    (tmp_path / "masks" / "x.txt").write_text("a note")
    assert len(load("folder", root=tmp_path)) == 1
    write_image(tmp_path / "images" / "x.jpg")
    with pytest.raises(ValueError, match="images must hold one file of each name"):
        load("folder", root=tmp_path)


def test_images_without_masks(tmp_path, write_image):
    write_image(tmp_path / "images" / "x.png")
    with pytest.raises(ValueError, match="must hold masks/ beside images/. Got images/ alone"):
        load("folder", root=tmp_path)


def test_links_that_lead_nowhere_are_reported(tmp_path, write_image):
    write_image(tmp_path / "a" / "x.png")
    (tmp_path / "a" / "y.png").symlink_to(tmp_path / "gone.png")
    with pytest.raises(ValueError, match="y.png must exist"):
        load("folder", root=tmp_path)
    (tmp_path / "a" / "y.png").unlink()
    (tmp_path / "b").symlink_to(tmp_path / "gone")
    with pytest.raises(ValueError, match="links must lead somewhere. Got .*/b. Fix or remove"):
        load("folder", root=tmp_path)


def test_a_class_without_images_cannot_be_learned(tmp_path, write_image):
    write_image(tmp_path / "train" / "cat" / "x.png")
    write_image(tmp_path / "test" / "cat" / "x.png")
    (tmp_path / "train" / "dog").mkdir()
    with pytest.raises(ValueError, match="Got no images in dog"):
        load("folder", root=tmp_path)
    write_image(tmp_path / "train" / "dog" / "x.png")
    (tmp_path / "test" / "dog").mkdir()
    assert len(load("folder", split="test", root=tmp_path)) == 1


def test_a_dark_image_of_16_bits_stays_dark(tmp_path):
    (tmp_path / "a").mkdir()
    Image.fromarray(np.array([[0, 200, 257, 65535]], np.uint16)).save(tmp_path / "a" / "x.png")
    Image.fromarray(np.array([[0, 200, 200, 200]], np.uint16)).save(tmp_path / "a" / "y.png")
    images = load("folder", root=tmp_path, mode="L").images
    assert images.flatten(1).tolist() == [[0, 1, 1, 255], [0, 1, 1, 1]]


def test_formats_that_other_programs_would_run_are_not_read(tmp_path, write_image):
    write_image(tmp_path / "a" / "x.png")
    eps = write_image(tmp_path / "a" / "x.eps")
    (tmp_path / "a" / "x.pdf").write_bytes(b"%PDF-1.4")
    assert len(load("folder", root=tmp_path)) == 1
    eps.rename(eps.with_suffix(".jpg"))
    with pytest.raises(ValueError, match="x.jpg is not an image that Pillow reads"):
        load("folder", root=tmp_path)


def test_the_folder_must_be_named(tmp_path, monkeypatch):
    monkeypatch.setenv("CMCL_DATA", str(tmp_path))
    with pytest.raises(ValueError, match="root must name the folder of your images"):
        load("folder")


def test_masks_that_do_not_fit(tmp_path, write_image, write_mask):
    write_image(tmp_path / "images" / "fits.png")
    write_mask(tmp_path / "masks" / "fits.png")
    write_image(tmp_path / "images" / "big.png")
    write_mask(tmp_path / "masks" / "big.png", size=(9, 10))
    write_image(tmp_path / "images" / "alone.png")
    with pytest.raises(ValueError, match="Got 2 that are not") as caught:
        load("folder", root=tmp_path, size=8)
    assert "big.png must have the size of its image. Got (9, 10) and (8, 10)" in str(caught.value)
    assert "alone.png must exist" in str(caught.value)


def test_no_read_permission(open_folder, write_image, run_unprivileged):
    write_image(open_folder / "a" / "x.png").chmod(0)
    result = run_unprivileged(f"cmcl.data.load('folder', root={str(open_folder)!r})")
    assert "x.png must be readable. Got no read permission" in result.stderr.strip().splitlines()[-1]
