"""Small files in the formats of the real sets, written by the tests themselves."""

import io
import os
import pickle
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


class Cifar:
    """Five training batches and a test batch of 20 images, ready to be written in every version."""

    def __init__(self, n=20):
        rng = np.random.default_rng(0)
        self.names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
        self.data = {name: rng.integers(0, 256, (n, 3072), dtype=np.uint8) for name in self.names}
        self.labels = {name: [int(x) for x in rng.permutation(np.arange(n) % 10)] for name in self.names}

    def train(self):
        data = np.concatenate([self.data[name] for name in self.names[:5]]).reshape(-1, 3, 32, 32)
        return data, [label for name in self.names[:5] for label in self.labels[name]]

    def files(self, protocol=2):
        files = {
            name: pickle.dumps({"data": self.data[name], "labels": self.labels[name]}, protocol=protocol)
            for name in self.names
        }
        return files | {"batches.meta": pickle.dumps({"label_names": CLASSES}, protocol=protocol)}

    def binary_files(self):
        files = {}
        for name in self.names:
            labels = np.array(self.labels[name], np.uint8)[:, None]
            files[f"{name}.bin"] = np.hstack([labels, self.data[name]]).tobytes()
        return files | {"batches.meta.txt": "\n".join([*CLASSES, ""]).encode()}

    def write(self, root, files=None, folder="cifar-10-batches-py"):
        (root / folder).mkdir(parents=True, exist_ok=True)
        for name, content in (files or self.files()).items():
            (root / folder / name).write_bytes(content)
        return root

    def write_archive(self, root, files=None, folder="cifar-10-batches-py", name="cifar-10-python.tar.gz"):
        with tarfile.open(root / name, "w:gz") as archive:
            for member, content in sorted((files or self.files()).items(), reverse=True):
                info = tarfile.TarInfo(f"{folder}/{member}")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
        return root / name


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    """Nothing is read from or left in the cache of whoever runs the tests."""
    monkeypatch.setenv("CMCL_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def cifar():
    return Cifar()


@pytest.fixture
def write_svhn(tmp_path):
    """Write svhn/{train,test}_32x32.mat and give back the images (N,3,32,32) and the labels as stored."""

    def write(split="train", n=30, **changes):
        rng = np.random.default_rng(1)
        images = rng.integers(0, 256, (n, 3, 32, 32), dtype=np.uint8)
        labels = (np.arange(n) % 10 + 1).astype(np.uint8)
        content = {"X": images.transpose(2, 3, 1, 0), "y": labels[:, None]} | changes
        (tmp_path / "svhn").mkdir(exist_ok=True)
        savemat(tmp_path / "svhn" / f"{split}_32x32.mat", content, do_compression=True)
        return images, labels

    return write


@pytest.fixture
def write_image():
    """Write an image of random pixels; `mode` and `size` (height, width) as asked."""

    def write(path, size=(8, 10), mode="RGB", seed=0, **options):
        rng = np.random.default_rng(seed)
        pixels = rng.integers(0, 256, (*size, 3), dtype=np.uint8)
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).convert(mode).save(path, **options)
        return path

    return write


@pytest.fixture
def write_mask():
    """Write a mask whose left half is foreground."""

    def write(path, size=(8, 10), value=255):
        mask = np.zeros(size, np.uint8)
        mask[:, : size[1] // 2] = value
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(mask).save(path)
        return path

    return write


@pytest.fixture
def run_python():
    """Run code in a new process, because it limits or may crash it."""
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}

    def run(code, *arguments):
        command = [sys.executable, "-c", code, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, env=env)

    return run
