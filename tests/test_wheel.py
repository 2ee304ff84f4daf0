"""The wheel alone, in an environment that has never seen the source: what a user installs works."""

import json
import os
import shutil
import site
import subprocess
import sys
import venv
from importlib.metadata import distributions
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).parents[1]
NEEDED = {"pip", "setuptools"}
# by their metadata: looking for the module pip would switch setuptools' distutils off, which torch compiles with
HERE = {found.metadata["Name"] for found in distributions()}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not NEEDED <= HERE, reason="a wheel is built by pip and setuptools, not both here"),
]
CLEAN = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}


def run(*command, cwd):
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=CLEAN, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The folder of a fresh environment with the wheel in it and, by a .pth file, what it depends on."""
    home = tmp_path_factory.mktemp("wheel")
    source = home / "source"  # building leaves files beside the code
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", home, source, cwd=home)
    shutil.rmtree(source)
    (wheel,) = home.glob("*.whl")
    venv.create(home / "env")
    python = home / "env" / "bin" / "python"
    run(*pip, "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=home)
    assert_own(home)
    packages = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=home).strip()
    (Path(packages) / "dependencies.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    assert_own(home)
    return home / "env"


def assert_own(home):
    """The code is the wheel's."""
    file = run(home / "env" / "bin" / "python", "-c", "import cmcl; print(cmcl.__file__)", cwd=home).strip()
    assert Path(file).is_relative_to(home / "env")


def test_from_an_empty_folder(installed, tmp_path):
    cmcl = installed / "bin" / "cmcl"
    recipes = json.loads(run(cmcl, "list", "--json", cwd=tmp_path))["recipes"]
    assert "digits-cmcl" in {recipe["name"] for recipe in recipes}

    words = ("train", "digits-cmcl", "--steps", 2, "--device", "cpu", "--quiet", "--json")
    (trained,) = json.loads(run(cmcl, *words, cwd=tmp_path))
    folder = trained["run"]
    run(cmcl, "report", folder, "-o", "page.html", cwd=tmp_path)
    assert "digits-cmcl" in (tmp_path / "page.html").read_text(encoding="utf-8")

    Image.new("L", (8, 8)).save(tmp_path / "black.png")
    answer = json.loads(run(cmcl, "predict", folder, "black.png", "--device", "cpu", "--json", cwd=tmp_path))
    assert len(answer["members"]) == 5
    run(cmcl, "export", folder, "-o", "model.pt2", "--limit", 4, cwd=tmp_path)
    assert (tmp_path / "model.pt2").exists()
