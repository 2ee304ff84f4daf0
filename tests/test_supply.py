"""Nothing is fetched unasked: no connection is made by imports, training and prediction. And `make audit`."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# An audit hook hears of every socket that Python code opens to another process, whatever library does it.
BLOCK = """
import os, sys

def hook(event, arguments):
    local = event == "socket.connect" and isinstance(arguments[1], (str, bytes))  # a file, not a network
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto") and not local:
        print("NETWORK", event, arguments[1:], file=sys.stderr, flush=True)
        os._exit(99)

sys.addaudithook(hook)
"""
IMPORTS = """
import importlib, pkgutil, cmcl
for module in pkgutil.walk_packages(cmcl.__path__, "cmcl."):
    if not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
        except ImportError as error:  # an extra that is not installed
            assert not (error.name or "cmcl").startswith("cmcl"), error
"""
TRAINING = """
import sys
from pathlib import Path
from dataclasses import replace
import numpy as np
from PIL import Image
from cmcl import Options, cli
from cmcl.reproduction import find
from cmcl.reproduction.runner import run, run_folder
recipe = replace(find("digits-300-cmcl"), members=2, overlap=1, epochs=None, steps=3)
run(recipe, (0,), name="tiny", out=sys.argv[1], options=Options(device="cpu", quiet=True))
image = Path(sys.argv[1]) / "x.png"
Image.fromarray(np.zeros((8, 8), np.uint8)).save(image)
folder = run_folder(sys.argv[1], "tiny", recipe, 0)
sys.argv = ["cmcl", "predict", str(folder), str(image), "--device", "cpu", "--json", "--workers", "1"]
cli.main()
"""


def blocked(code, *arguments):
    command = [sys.executable, "-c", BLOCK + code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


@pytest.mark.parametrize(
    "code",
    [
        "import socket; socket.create_connection(('127.0.0.1', 9))",
        "import urllib.request; urllib.request.urlopen('http://192.0.2.1')",
        "import socket; socket.getaddrinfo('example.org', 80)",
    ],
)
def test_the_block_works(code):
    done = blocked(code)
    assert (done.returncode, done.stderr.split()[0]) == (99, "NETWORK")


def test_imports_make_no_connection():
    done = blocked(IMPORTS)
    assert done.returncode == 0, done.stderr


def test_training_and_prediction_make_no_connection(tmp_path):
    done = blocked(TRAINING, tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["image"] == str(tmp_path / "x.png")


@pytest.fixture(scope="module")
def verdict():
    if not (ROOT / ".ci" / "audit.py").exists():
        pytest.skip("needs the repository")
    spec = importlib.util.spec_from_file_location("audit", ROOT / ".ci" / "audit.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.verdict


def audited(*packages):
    return json.dumps({"dependencies": list(packages)})


FINE = {"name": "a", "version": "1", "vulns": []}
HOLE = {"id": "PYSEC-1", "aliases": ["CVE-1"], "fix_versions": ["2"], "description": ""}
UNKNOWN = {"name": "c", "version": "1", "skip_reason": "Dependency not found on PyPI: c (1)"}


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        (audited(FINE, FINE), 0, "2 packages checked, 0 known vulnerabilities"),
        (audited(FINE, {**FINE, "name": "b", "vulns": [HOLE]}), 1, "b 1: PYSEC-1, CVE-1; fixed in 2"),
        (audited(FINE, UNKNOWN), 2, "NOT CHECKED: 1 of 2 packages. Dependency not found on PyPI: c (1)"),
        (audited(UNKNOWN, {**FINE, "vulns": [HOLE]}), 1, "NOT CHECKED: 1 of 2 packages"),
        ("", 2, "NOT CHECKED: ConnectionError: no route"),
    ],
)
def test_what_was_not_checked_is_no_pass(verdict, text, code, message):
    found, said = verdict(text, "Traceback\nConnectionError: no route\n")
    assert found == code
    assert message in said


def test_an_audit_without_its_program_or_database_says_not_checked(verdict, tmp_path):
    (tmp_path / "pip_audit.py").write_text("raise ConnectionError('no route')")
    command, environment = [sys.executable, ROOT / ".ci" / "audit.py"], {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    assert (done.returncode, done.stdout) == (2, "NOT CHECKED: ConnectionError: no route\n")


def test_constraints_are_exact():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert all(line.count("==") == 1 and "*" not in line for line in lines)
    names = [line.split("==")[0].lower().replace("_", "-") for line in lines]
    assert len(names) == len(set(names))
