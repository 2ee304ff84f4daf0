import numpy as np
import pytest
import torch
from PIL import Image

from cmcl.data import load
from cmcl.data.dataset import load_recipe
from cmcl.data.folder import look
from cmcl.data.images import stored_size
from cmcl.data.registry import address, parse_address

LOSSLESS = {"webp": {"lossless": True, "exact": True}}  # exact: hidden colours too


def save(path, pixels, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(np.asarray(pixels))
    image.save(path, **options)
    return path


def test_class_folders(tmp_path, write_image):
    for i in range(3):
        write_image(tmp_path / "dog" / f"{i}.png", seed=i)
        write_image(tmp_path / "cat" / f"{i}.PNG", seed=9 + i)
    (tmp_path / "cat" / "notes.txt").write_text("no image")
    (tmp_path / "cat" / ".DS_Store").write_bytes(b"x")
    (tmp_path / ".git").mkdir()
    data = load("folder", root=tmp_path)
    assert data.classes == ("cat", "dog")
    assert data.targets.tolist() == [0, 0, 0, 1, 1, 1]
    expected = np.random.default_rng(9).integers(0, 256, (8, 10, 3), dtype=np.uint8)
    assert (data.images[0].permute(1, 2, 0).numpy() == expected).all()


def test_splits_have_the_same_class_indices(tmp_path, write_image):
    for name in ("ant", "bee", "cow"):
        write_image(tmp_path / "train" / name / "x.png")
    write_image(tmp_path / "test" / "cow" / "y.png")
    assert load("folder", split="test", root=tmp_path).targets.tolist() == [2]
    write_image(tmp_path / "test" / "dog" / "y.png")
    with pytest.raises(ValueError, match="classes that train/ lacks: dog"):
        load("folder", split="test", root=tmp_path)


def test_folders_without_images(tmp_path, write_image, monkeypatch):
    write_image(tmp_path / "train" / "cat" / "x.png")
    write_image(tmp_path / "test" / "cat" / "x.png")
    (tmp_path / "train" / "dog").mkdir()
    with pytest.raises(ValueError, match="Got no images in dog. Lay it out as"):
        load("folder", root=tmp_path)
    write_image(tmp_path / "train" / "dog" / "x.png")
    (tmp_path / "test" / "dog").mkdir()
    assert len(load("folder", split="test", root=tmp_path)) == 1  # only training needs every class
    with pytest.raises(FileNotFoundError, match="must hold a folder validation/"):
        load("folder", split="validation", root=tmp_path)
    with pytest.raises(FileNotFoundError, match="must hold a folder train/"):
        load("folder", root=tmp_path / "nowhere")
    monkeypatch.setenv("CMCL_DATA", str(tmp_path))
    with pytest.raises(ValueError, match="root must name the folder of your images"):
        load("folder")


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "1", "CMYK", "I;16", "I", "F", "YCbCr"])
def test_every_mode_that_pillow_reads(tmp_path, mode):
    grey = np.tile(np.linspace(0, 255, 16).astype(np.uint8), (8, 1))
    if mode in ("I;16", "I"):
        image = Image.fromarray(grey.astype(np.uint16 if mode == "I;16" else np.int32) * 257)
    else:
        image = Image.fromarray(grey).convert(mode, dither=Image.Dither.NONE)
    save(tmp_path / "grey" / f"x.{'tiff' if mode in ('CMYK', 'I', 'F', 'YCbCr') else 'png'}", image)
    pixels = load("folder", root=tmp_path).images[0].int()
    assert pixels.shape == (3, 8, 16)
    assert (pixels - torch.from_numpy(grey).int()).abs().max() <= (128 if mode == "1" else 3)


@pytest.mark.parametrize("ending", ["png", "webp", "tiff"])
def test_transparent_pixels_are_white(tmp_path, ending):
    """The red of the first pixel is hidden; half of the second shows."""
    pixels = np.array([[[255, 0, 0, 0], [0, 0, 0, 128], [0, 0, 255, 255]]], np.uint8)
    save(tmp_path / "a" / f"x.{ending}", pixels, **LOSSLESS.get(ending, {}))
    images = load("folder", root=tmp_path).images
    assert images[0, :, 0].T.tolist() == [[255, 255, 255], [127, 127, 127], [0, 0, 255]]
    assert load("folder", root=tmp_path, mode="L").images.flatten().tolist() == [255, 127, 29]


@pytest.mark.parametrize(("mode", "hidden"), [("L", 7), ("RGB", (7, 7, 7)), ("P", 7)])
def test_a_transparent_colour_is_white(tmp_path, mode, hidden):
    image = Image.new(mode, (2, 1), hidden)
    if mode == "P":
        image.putpalette([7] * 24 + [9] * 3)
    image.putpixel((1, 0), {"L": 9, "RGB": (9, 9, 9), "P": 8}[mode])
    save(tmp_path / "a" / "x.png", image, transparency=hidden)
    assert load("folder", root=tmp_path).images[0, 0].tolist() == [[255, 9]]


@pytest.mark.parametrize("kind", ["RGBA", "LA", "P"])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_an_opaque_image_is_what_pillow_converts_it_to(tmp_path, kind, mode):
    """Bit by bit: so checksums of datasets do not depend on how transparency is treated."""
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    pixels[:4] = np.arange(256, dtype=np.uint8).reshape(4, 64, 1)
    image = Image.fromarray(pixels).convert("L" if kind == "LA" else "RGB").convert(kind)
    save(tmp_path / "a" / "x.png", image)
    expected = np.array(image.convert("RGB").convert(mode)).reshape(64, 64, -1)
    assert (load("folder", root=tmp_path, mode=mode).images[0].permute(1, 2, 0).numpy() == expected).all()


def test_grey_on_request_and_photos_upright(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # turned a quarter: the left side is really the top
    path = save(tmp_path / "a" / "x.png", np.array([[0, 255], [0, 255], [0, 255]], np.uint8), exif=exif)
    assert load("folder", root=tmp_path, mode="L").images.tolist() == [[[[0, 0, 0], [255, 255, 255]]]]
    assert stored_size(path) == (3, 2)
    with pytest.raises(ValueError, match="'RGB', 'L'. Got 'rgb'"):
        load("folder", root=tmp_path, mode="rgb")


@pytest.mark.parametrize(
    ("kind", "values", "expected"),
    [
        (np.uint16, [0, 200, 257, 65535], [0, 1, 1, 255]),
        (np.uint16, [0, 200, 200, 200], [0, 1, 1, 1]),  # a dark image of 16 bits stays dark
        (np.int32, [0, 7, 255], [0, 7, 255]),  # of other numbers, the largest tells the scale
        (np.int32, [0, 256, 65535], [0, 1, 255]),
        (np.int32, [0, 100, 256], [0, 0, 1]),
        (np.float32, [0, 0.5, 1], [0, 128, 255]),
        (np.float32, [0, 1.5, 2], [0, 2, 2]),
    ],
)
def test_the_scale_of_large_numbers(tmp_path, kind, values, expected):
    save(tmp_path / "a" / ("x.png" if kind == np.uint16 else "x.tiff"), np.array([values], kind))
    assert load("folder", root=tmp_path, mode="L").images.flatten().tolist() == expected


def test_sizes_must_agree_or_be_given(tmp_path, write_image):
    path = write_image(tmp_path / "a" / "x.png", size=(40, 50))
    write_image(tmp_path / "a" / "y.png", size=(20, 6))
    with pytest.raises(ValueError, match=r"Got \(20, 6\) and \(40, 50\).*Pass size="):
        load("folder", root=tmp_path)
    assert load("folder", root=tmp_path, size=1).images.shape == (2, 3, 1, 1)
    with Image.open(path) as image:
        expected = np.asarray(image.resize((9, 7), Image.Resampling.BICUBIC))
    pixels = load("folder", root=tmp_path, size=(7, 9)).images[0].permute(1, 2, 0).numpy()
    assert (pixels == expected).all()


def test_all_broken_files_are_named_at_once(tmp_path, write_image):
    write_image(tmp_path / "a" / "good.png")
    cut = write_image(tmp_path / "a" / "cut.png", size=(60, 60))
    cut.write_bytes(cut.read_bytes()[:2000])
    assert stored_size(cut) == (60, 60)  # known from the header
    (tmp_path / "a" / "empty.jpg").touch()
    (tmp_path / "a" / "text.jpg").write_text("hello")
    (tmp_path / "a" / "link.png").symlink_to(tmp_path / "gone.png")
    write_image(tmp_path / "a" / "x.eps").rename(tmp_path / "a" / "program.jpg")  # Pillow would run another
    (tmp_path / "a" / "x.pdf").write_bytes(b"%PDF-1.4")  # no image: left out
    with pytest.raises(ValueError, match="Got 5 that are not") as caught:
        load("folder", root=tmp_path)
    for problem in (
        "cut.png is damaged",
        "empty.jpg is empty",
        "text.jpg is not",
        "program.jpg is not",
        "link.png must",
    ):
        assert problem in str(caught.value)


def test_a_broken_link_to_a_folder(tmp_path, write_image):
    write_image(tmp_path / "a" / "x.png")
    (tmp_path / "b").symlink_to(tmp_path / "gone")
    with pytest.raises(ValueError, match="links must lead somewhere. Got .*/b"):
        load("folder", root=tmp_path)


def test_a_decompression_bomb_is_not_decoded(tmp_path, write_image, monkeypatch):
    write_image(tmp_path / "a" / "x.png", size=(8, 10))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 39)
    with pytest.raises(ValueError, match=r"x.png is too large .*80 pixels.* Resize it"):
        load("folder", root=tmp_path)


@pytest.mark.parametrize("value", [1, 255])
def test_images_with_masks(tmp_path, write_image, write_mask, value):
    for group in ("sea", "land"):
        write_image(tmp_path / "images" / group / "x.jpg", quality=95)
        write_mask(tmp_path / "masks" / group / "x.png", value=value)
    data = load("folder", root=tmp_path)
    assert data.classes == ("background", "foreground")
    assert data.groups == ("land", "sea")
    assert data.targets.dtype == torch.uint8
    assert data.targets[0, 0].tolist() == [1] * 5 + [0] * 5
    assert load("folder", root=tmp_path, size=(4, 20)).targets[1, 2].tolist() == [1] * 10 + [0] * 10


@pytest.fixture
def read_mask(tmp_path, write_image):
    """Save a mask beside an image of its size, and load it."""

    def read(mask, name="x.png", **options):
        image = mask if isinstance(mask, Image.Image) else Image.fromarray(np.asarray(mask))
        write_image(tmp_path / "images" / "x.png", size=image.size[::-1])
        for old in tmp_path.glob("masks/*"):
            old.unlink()
        save(tmp_path / "masks" / name, image)
        return load("folder", root=tmp_path, **options).targets[0].tolist()

    return read


def test_masks_of_class_indices(read_mask):
    pixels = np.array([[0, 2, 255]], np.uint8)
    with pytest.raises(ValueError, match="x.png must hold 0 and 1, or 0 and 255. Got 2. Name all classes"):
        read_mask(pixels)
    assert read_mask(pixels, classes=["sky", "sea", "ship"]) == [[0, 2, 255]]
    # of two classes, black and white masks have no indices: white is the second class
    assert read_mask(np.array([[0, 255]], np.uint8), classes=["sky", "sea"]) == [[0, 1]]
    assert read_mask(np.array([[0, 1, 255]], np.uint8), classes=["sky", "sea"]) == [[0, 1, 255]]


def test_masks_with_palettes(read_mask):
    """Two colours mean what they look like; with named classes, the indices count."""
    mask = Image.fromarray(np.array([[0, 1]], np.uint8))
    mask.putpalette([255, 255, 255, 0, 0, 0])  # white comes first
    assert read_mask(mask) == [[1, 0]]
    assert read_mask(mask, classes=["a", "b"]) == [[0, 1]]
    mask.putpalette([255, 0, 0, 0, 0, 255])
    with pytest.raises(ValueError, match="x.png must hold black and one other colour"):
        read_mask(mask)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P", "CMYK", "YCbCr"])
@pytest.mark.parametrize("colour", [(255, 0, 0), (255, 255, 255)])
def test_masks_of_black_and_one_other_colour(read_mask, mode, colour):
    image = Image.fromarray(np.array([[colour, (0, 0, 0)]], np.uint8)).convert(mode)
    assert read_mask(image, "x.png" if mode in {"RGB", "RGBA", "P"} else "x.tiff") == [[1, 0]]


@pytest.mark.parametrize(
    ("pixels", "message"),
    [
        ([(255, 0, 0), (0, 255, 0)], r"black and one other colour. Got .* Draw the background black"),
        ([(255, 0, 0, 0), (255, 0, 0, 255)], "black and one other colour"),  # which one is meant?
        ([(0, 0, 0), (255, 0, 0), (0, 255, 0)], "0 and 1, or 0 and 255. Got 76"),
        ([(0, 0, 0), (2, 2, 2)], "0 and 1, or 0 and 255. Got 2"),  # a class index
    ],
)
def test_masks_of_other_colours(read_mask, pixels, message):
    with pytest.raises(ValueError, match=f"x.png must hold {message}"):
        read_mask(np.array([pixels], np.uint8))


@pytest.mark.parametrize(("kind", "ending"), [(np.uint16, "png"), (np.int32, "tiff"), (np.float32, "tiff")])
def test_masks_of_large_numbers(read_mask, kind, ending):
    def read(*values, **options):
        return read_mask(np.array([values], kind), f"x.{ending}", **options)

    classes = {"classes": ["a", "b", "c"]}
    assert read(0, 1, 1) == read(0, 65535, 65535) == [[0, 1, 1]]
    assert read(0, 1, 2, **classes) == [[0, 1, 2]]
    assert read(255, 65535, 2, **classes) == [[255, 255, 2]]
    for expected, options in (
        ("class indices 0 to 2", classes),
        ("0 and 1, or 0 and 255", {}),
        ("class indices 0 to 254", {"classes": [str(i) for i in range(400)]}),  # a mask is kept in bytes
    ):
        with pytest.raises(ValueError, match=f"x.* must hold {expected}. Got 300"):
            read(0, 1, 300, **options)


def test_a_wrong_value_is_found_before_resizing_loses_it(read_mask):
    pixels = np.zeros((9, 9), np.uint8)
    pixels[0, 0] = 7
    with pytest.raises(ValueError, match="x.png must hold 0 and 1, or 0 and 255. Got 7"):
        read_mask(pixels, size=3)


def test_masks_that_do_not_fit(tmp_path, write_image, write_mask):
    write_image(tmp_path / "images" / "fits.png")
    with pytest.raises(ValueError, match="must hold masks/ beside images/. Got images/ alone"):
        load("folder", root=tmp_path)
    write_mask(tmp_path / "masks" / "fits.png")
    write_image(tmp_path / "images" / "big.png")
    write_mask(tmp_path / "masks" / "big.png", size=(9, 10))
    write_image(tmp_path / "images" / "alone.png")
    with pytest.raises(ValueError, match="Got 2 that are not") as caught:
        load("folder", root=tmp_path, size=8)
    assert "big.png must have the size of its image. Got (9, 10) and (8, 10)" in str(caught.value)
    assert "alone.png must exist" in str(caught.value)


def test_two_files_of_one_name(tmp_path, write_image, write_mask):
    write_image(tmp_path / "images" / "x.png")
    write_mask(tmp_path / "masks" / "x.png")
    extra = write_mask(tmp_path / "masks" / "x.bmp")
    with pytest.raises(ValueError, match="masks must hold one file of each name. Got x.bmp and x.png"):
        load("folder", root=tmp_path)
    extra.rename(extra.with_suffix(".txt"))
    assert len(load("folder", root=tmp_path)) == 1
    write_image(tmp_path / "images" / "x.jpg")
    with pytest.raises(ValueError, match="images must hold one file of each name"):
        load("folder", root=tmp_path)


@pytest.fixture
def unsplit(tmp_path, write_image):
    for label, count in (("ant", 10), ("bee", 20)):
        for i in range(count):
            write_image(tmp_path / label / f"{i:02}.png", seed=hash((label, i)) % 2**31)
    return tmp_path


def test_a_folder_that_is_not_split_has_a_seeded_stratified_test_split(unsplit):
    both = {split: load("folder", split=split, root=unsplit, test=0.3) for split in ("train", "test")}
    assert [both[split].targets.bincount().tolist() for split in both] == [[7, 14], [3, 6]]
    assert both["test"].split == "test"
    whole = {image.numpy().tobytes() for image in load("folder", root=unsplit).images}
    parts = [image.numpy().tobytes() for split in both.values() for image in split.images]
    assert len(parts) == len(whole) == 30
    assert set(parts) == whole
    again = load("folder", split="test", root=unsplit, test=0.3)
    assert again.checksum == both["test"].checksum
    with pytest.raises(FileNotFoundError, match="must hold a folder test/"):
        load("folder", split="test", root=unsplit)


def test_a_split_folder_stays_split(tmp_path, write_image):
    for split in ("train", "test"):
        write_image(tmp_path / split / "ant" / "x.png", seed=len(split))
    assert len(load("folder", split="train", root=tmp_path, test=0.5)) == 1
    assert len(load("folder", split="test", root=tmp_path, test=0.5)) == 1


def test_an_address_names_folder_and_options(unsplit):
    name = address(str(unsplit), {"test": 0.3, "mode": "L", "size": [4, 6]})
    assert name == f"folder:{unsplit}?test=0.3&mode=L&size=[4,6]"
    assert parse_address(name) == ("folder", str(unsplit), {"test": 0.3, "mode": "L", "size": [4, 6]})
    assert parse_address("digits") == ("digits", None, {})
    data = load(name, split="test")
    assert data.images.shape == (9, 1, 4, 6)
    assert load_recipe(data.recipe).checksum == data.checksum
    for wrong in ("folder:", "digits:x"):
        with pytest.raises(ValueError, match="folder:PATH"):
            load(wrong)
    with pytest.raises(ValueError, match="question mark"):
        address("a?b", {})


def test_look_finds_classes_channels_and_size(unsplit):
    assert look(unsplit, {}) == ({"test": 0.2}, ("ant", "bee"), (3, 8, 10))
    assert look(unsplit, {"size": 4, "mode": "L"})[2] == (1, 4, 4)
    for path in unsplit.glob("*/*.png"):
        Image.open(path).convert("L").save(path)
    assert look(unsplit, {}) == ({"mode": "L", "test": 0.2}, ("ant", "bee"), (1, 8, 10))
    assert look(unsplit, {"mode": "RGB"})[2] == (3, 8, 10)
    save(unsplit / "bee" / "colour.png", np.zeros((8, 10, 3), np.uint8))
    assert look(unsplit, {})[2] == (3, 8, 10), "one image with colours"
