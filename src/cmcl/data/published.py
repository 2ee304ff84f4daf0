"""What the sets' authors published: where the files are, their checksums, and what is in them."""

from collections.abc import Mapping
from dataclasses import dataclass

ICOSEG_SITE = "http://chenlab.ece.cornell.edu/projects/touch-coseg/"  # has no files with fixed addresses


@dataclass(frozen=True)
class Published:
    """Known facts of a set."""

    site: str  # folder that holds the downloads
    downloads: Mapping[str, str]  # path under the root -> md5; the last part is the name on the site
    files: Mapping[str, str]  # path under the root -> md5, of all files that the set may be read from
    counts: Mapping[str, int]  # images by split
    classes: tuple[int, ...]  # training images by class
    mean: tuple[float, ...]  # channel means of the training split, 0..1
    std: tuple[float, ...]


# md5 of the archive: https://www.cs.toronto.edu/~kriz/cifar.html; of the files inside: torchvision's cifar.py
_CIFAR10_ARCHIVE = {"cifar-10-python.tar.gz": "c58f30108f718f92721af3b95e74349a"}
_CIFAR10_BATCHES = {
    "cifar-10-batches-py/data_batch_1": "c99cafc152244af753f735de768cd75f",
    "cifar-10-batches-py/data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "cifar-10-batches-py/data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "cifar-10-batches-py/data_batch_4": "634d18415352ddfa80567beed471001a",
    "cifar-10-batches-py/data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "cifar-10-batches-py/test_batch": "40351d587109b95175f43aff81a1287e",
    "cifar-10-batches-py/batches.meta": "5ff9c542aee3614f3951f8cda6e48888",
}
# md5 of the binary version: the same page
_CIFAR10_BINARY = {"cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530"}
# md5: torchvision's svhn.py (the site itself lists none)
_SVHN = {
    "svhn/train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373",
    "svhn/test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3",
}

# `Dataset.checksum` of the whole set, of a copy with the same images, labels and order but other bytes than
# the files above. SVHN's is not known: the copy at hand was rebuilt, and a few of its values differ by 1.
CHECKSUMS = {
    "cifar10": {
        "train": "1b124094fa71757e2a5794ab052453e80b30eb27728f9bb8898b70e728ae8c32",
        "test": "335e460fac2f8961874196617fb75418986862673dd66fb6d78ab4e0b8660a14",
    },
}

PUBLISHED = {
    "cifar10": Published(
        site="https://www.cs.toronto.edu/~kriz",
        downloads=_CIFAR10_ARCHIVE,
        files=_CIFAR10_BATCHES | _CIFAR10_ARCHIVE | _CIFAR10_BINARY,
        counts={"train": 50_000, "test": 10_000},
        classes=(5_000,) * 10,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
    ),
    "svhn": Published(
        site="http://ufldl.stanford.edu/housenumbers",
        downloads=_SVHN,
        files=_SVHN,
        counts={"train": 73_257, "test": 26_032},
        classes=(4_948, 13_861, 10_585, 8_497, 7_458, 6_882, 5_727, 5_595, 5_045, 4_659),
        mean=(0.4377, 0.4438, 0.4728),
        std=(0.1980, 0.2010, 0.1970),
    ),
}
