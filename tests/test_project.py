"""The project as a whole: the rules of its architecture, documented public names."""

import ast
import inspect
import re
import subprocess
import sys
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import cmcl
from cmcl.data.registry import DATASETS
from cmcl.networks import NETWORKS

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "cmcl"

# A module imports from its own layer and from those above, never from below.
LAYERS = [
    {"lazy", "_files", "_schema", "_messages", "_checks"},
    {"objectives", "sharing", "metrics", "networks", "data"},
    {"splitting", "ensemble", "stacking"},
    {"pretrained", "serialization", "calibration"},
    {"training"},
    {"reproduction"},
    {"report", "estimator", "export", "demo"},
    {"cli", "__main__"},
]
CORE = ("objectives", "sharing", "splitting", "ensemble", "stacking")  # know neither data nor networks
PRIVATE_TORCH = {"splitting", "training.cuda"}
REGISTRIES = ("networks", "data", "reproduction")  # where names of datasets and networks may be literals
PUBLIC = {
    *("__version__", "confident_oracle_loss", "independent_loss", "oracle_loss", "OracleLoss"),
    *("winner_takes_all", "WinnerTakesAll", "assign"),
    *("share_features", "Ensemble", "Prediction", "shareable_layers", "Layer"),
    *("from_pretrained", "SharedStemEnsemble", "load", "Recipe", "Options", "Result", "Interrupted"),
    *("Diverged", "fit", "evaluate", "record", "CMCLClassifier"),
    *("metrics", "networks", "data", "calibration", "export", "report"),
}

# Known violations: these lists may only shrink.
INNER_IMPORTS = {"ensemble.save"}
TWICE = {"batches"}
LITERALS = {"cli.loading: folder", "cli.common: folder"}  # where the word means a folder of the user's
PRIVATE = {"training.cuda: _buffers", "training.step: _buffers"}


def module_name(path):
    return ".".join(part for part in path.relative_to(PACKAGE).with_suffix("").parts if part != "__init__")


FILES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text()) for name, path in FILES.items()}


def imported(name, node):
    """The cmcl modules that an import statement names: module, or module with the name inside it."""
    if isinstance(node, ast.Import):
        return [alias.name.removeprefix("cmcl.") for alias in node.names if alias.name.startswith("cmcl.")]
    if not isinstance(node, ast.ImportFrom):
        return []
    module = (node.module or "").split(".") if node.module else []
    if node.level:
        package = FILES[name].relative_to(PACKAGE).parts[:-1]
        module = [*package[: len(package) - node.level + 1], *module]
    elif module[0] == "cmcl":
        module = module[1:]
    else:
        return []
    found = [".".join([*module, alias.name]) for alias in node.names]
    return [full if full in FILES else ".".join(module) for full in found]


def typing_only(tree):
    """Nodes under `if TYPE_CHECKING:`, which never run."""
    blocks = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    return {node for block in blocks for node in ast.walk(block)}


def imports(name):
    """The cmcl modules that a module imports, anywhere in it."""
    skipped = typing_only(TREES[name])
    nodes = [node for node in ast.walk(TREES[name]) if node not in skipped]
    return {other for node in nodes for other in imported(name, node)} - {"", name}


def layer(name):
    return next(i for i, names in enumerate(LAYERS) if name.split(".")[0] in names)


@pytest.mark.parametrize("name", [name for name in FILES if name])
def test_imports_point_to_lower_layers(name):
    allowed = {"serialization"} if name == "ensemble" else set()  # Ensemble.save, inside the method
    assert {other for other in imports(name) - allowed if layer(other) > layer(name)} == set()
    if name in CORE:
        assert {other for other in imports(name) if other.split(".")[0] in ("data", "networks")} == set()


def test_there_are_no_import_cycles():
    graph = {name: imports(name) for name in FILES if name and not name.endswith("__main__")}
    graph["ensemble"] = graph["ensemble"] - {"serialization"}
    for name, others in graph.items():  # a package's __init__ names its modules: that is no use of them
        graph[name] = {other for other in others if not other.startswith(f"{name}.")}
        graph[name] -= {".".join(name.split(".")[:-1])}
    TopologicalSorter(graph).prepare()


def test_functions_import_nothing_of_ours():
    """Except in cli, where it keeps the start fast, and in `__init__`."""
    found = set()
    for name, tree in TREES.items():
        if FILES[name].name != "__init__.py" and name.split(".")[0] != "cli":
            functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
            found |= {
                f"{name}.{function.name}"
                for function in functions
                if any(imported(name, node) for node in ast.walk(function))
            }
    assert found <= INNER_IMPORTS, "import at the top of the file"


def test_private_torch_is_guarded_and_in_two_modules():
    users = {name for name, path in FILES.items() if "private_torch" in path.read_text()}
    assert users - {"_messages"} <= PRIVATE_TORCH
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and re.match(r"(torch|nn)\b.*\._[a-z]", ast.unparse(node)):
                raise AssertionError(f"{name} uses {ast.unparse(node)}, not by private_torch")
            if isinstance(node, ast.Import | ast.ImportFrom):
                text = ast.unparse(node)
                assert not re.search(r"\btorch\b.*[. ]_[A-Za-z]", text), (
                    f"{name}: {text}, not by private_torch"
                )


def test_no_module_uses_what_is_private_in_another():
    """`other._name`, where the file defines no `_name` itself."""
    found = set()
    tuples = {"_replace", "_asdict", "_fields", "_make", "_getframe"}
    for name, tree in TREES.items():
        text = FILES[name].read_text()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and imported(name, node):
                private = {alias.name for alias in node.names if re.match(r"_[a-z]", alias.name)}
                found |= {
                    f"{name}: {other}" for other in private - {"_checks", "_files", "_schema", "_messages"}
                }
            if isinstance(node, ast.Attribute) and re.match(r"_[a-z]", node.attr) and node.attr not in tuples:
                own = re.search(
                    rf"(def|self\.|cls\.|^    )\s*{node.attr}\b|^{node.attr}\b", text, re.MULTILINE
                )
                if ast.unparse(node.value) not in ("self", "cls", "super()") and not own:
                    found.add(f"{name}: {node.attr}")
    assert found <= PRIVATE


def test_module_names_are_unique():
    count = Counter(path.stem for path in FILES.values() if not path.stem.startswith("__"))
    assert {stem for stem, times in count.items() if times > 1} <= TWICE


def test_names_of_datasets_and_networks_are_literals_in_their_registries_only():
    names = {*DATASETS, *NETWORKS}
    found = {
        f"{name}: {node.value}"
        for name, tree in TREES.items()
        if name.split(".")[0] not in REGISTRIES
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value in names
    }
    assert found <= LITERALS


def test_no_message_of_an_exception_is_compared():
    for name, tree in TREES.items():
        for handler in [node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler) and node.name]:
            for node in ast.walk(handler):
                compared = isinstance(node, ast.Compare) and f"str({handler.name})" in ast.unparse(node)
                begins = isinstance(node, ast.Attribute) and node.attr in ("startswith", "endswith")
                asked = begins and f"str({handler.name})" in ast.unparse(node.value)
                assert not any((compared, asked)), f"{name}: {ast.unparse(node)}"


def test_public_names_are_frozen():
    assert set(cmcl.__all__) == PUBLIC


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
