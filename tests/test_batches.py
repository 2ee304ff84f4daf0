from cmcl.training.batches import epoch_seed, permutation


def test_orders_stay_the_same_from_version_to_version():
    """A run resumed by a newer version must see the images that the old one would have seen."""
    assert epoch_seed(0, 0) == 3056769172604291498
    assert permutation(8, 0, 0).tolist() == [5, 6, 7, 2, 0, 4, 3, 1]
    first = permutation(100, 1, 0)
    assert not first.equal(permutation(100, 1, 1))
    assert not first.equal(permutation(100, 2, 0))
