"""The project as a whole: imports point one way, public names are documented, the README runs."""

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import cmcl

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "cmcl"

# A module imports only from those before it.
ORDER = [
    *("lazy", "_files", "_schema", "telling", "_checks"),
    *("objectives", "sharing", "metrics", "networks", "data"),
    *("splitting", "ensemble"),
    *("pretrained", "serialization", "calibration"),
    *("training", "reproduction", "report", "estimator", "export", "demo", "cli", "__main__"),
]
EXCEPTIONS = {("ensemble", "serialization")}  # Ensemble.save, inside the method


def imports(path: Path) -> set[str]:
    """The cmcl modules that a file imports, anywhere in it."""
    found = set()
    depth = len(path.relative_to(PACKAGE).parts)  # 1 at the top
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == depth:  # from . or from .. at the package's top
            found |= {node.module.split(".")[0]} if node.module else {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("cmcl."):
            found.add(node.module.split(".")[1])
    return found - {"__version__"}


def test_imports_point_one_way():
    for path in PACKAGE.rglob("*.py"):
        module = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if module == "__init__":
            continue
        for other in imports(path) - {module}:
            if (module, other) not in EXCEPTIONS:
                assert ORDER.index(other) < ORDER.index(module), f"{path.name} imports {other}"


def test_the_core_loads_few_modules():
    """What a reader must know to understand an ensemble."""
    code = "import sys, cmcl.ensemble; print(sum(name.partition('.')[0] == 'cmcl' for name in sys.modules))"
    out = subprocess.check_output([sys.executable, "-c", code], env={"PYTHONPATH": str(ROOT / "src")})
    assert int(out) <= 8


@pytest.mark.parametrize("name", [name for name in cmcl.__all__ if name != "__version__"])
def test_public_names_exist_and_are_documented(name):
    value = getattr(cmcl, name)
    assert inspect.getdoc(value)
    if inspect.isclass(value):
        for method, function in inspect.getmembers(value, inspect.isfunction):
            if method in vars(value) and not method.startswith("_"):
                assert function.__doc__, f"{name}.{method}"


def test_what_ends_a_run_has_one_class_under_both_names():
    for name in ("Interrupted", "Diverged"):
        assert getattr(cmcl, name) is getattr(cmcl.training, name)


def test_unknown_names():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        cmcl.nonsense  # noqa: B018


def test_importing_costs_nothing():
    code = "import sys, cmcl; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(ROOT / "src")})


def test_the_readme_runs(tmp_path, monkeypatch):
    """Every Python block, one after the other, as a reader would."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    names = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    assert names["error"] < 0.15, "the first block really learns"


def test_links_in_documents_lead_somewhere():
    for document in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\((?!http|#)([^)#]+)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"
