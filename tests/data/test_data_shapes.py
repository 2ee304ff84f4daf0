import numpy as np
import pytest

from cmcl.data import load
from cmcl.data.shapes import OBJECTS, draw


def test_scenes_depend_on_the_seed_alone_and_stay_the_same_from_version_to_version():
    """A published number names its data by these checksums."""
    shapes = load("shapes", groups=2, per_group=3, size=16)
    assert shapes.checksum[:16] == "e189158d10fb19cf"
    assert load("shapes", groups=2, per_group=3, size=16, seed=1).checksum != shapes.checksum
    assert load("digits").checksum[:16] == "ced7a35041ea5b65"


def test_splits_sizes_and_groups():
    train, test = (load("shapes", groups=4, per_group=5, size=(32, 48), split=s) for s in ("train", "test"))
    assert (len(train), len(test)) == (16, 4)
    assert train.images.shape[1:] == (3, 32, 48)
    assert test.groups == tuple(f"scene {g:03d}" for g in range(4))
    image, mask = draw(0, 2, 1, (24, 24))  # a scene does not depend on the others
    data = load("shapes", groups=3, per_group=2, size=24)
    assert (data.images[5].numpy() == image).all()
    assert (data.targets[5].numpy() == mask).all()


@pytest.mark.parametrize("group", range(2 * len(OBJECTS)))
def test_the_object_is_painted_where_the_mask_is(group):
    for index in range(3):
        image, mask = draw(3, group, index, (48, 48))
        assert 0.01 < mask.mean() < 0.9
        inside, outside = image[:, mask == 1].mean(1), image[:, mask == 0].mean(1)
        assert np.abs(inside - outside).max() > 8
        assert len(np.unique(image.reshape(3, -1).T, axis=0)) > 300


def test_wrong_sizes():
    with pytest.raises(ValueError, match="must be positive. Got 0 and 20"):
        load("shapes", groups=0)
    with pytest.raises(ValueError, match="at least 3 for a test split. Got 2"):
        load("shapes", groups=1, per_group=2, size=16, split="test")
    for size in (7, (8, 7), (64, 27)):
        with pytest.raises(ValueError, match=r"at least 8 each way.* Got \("):
            load("shapes", size=size)
