"""Mutation testing: change one expression of a module at a time and see whether its tests notice.

    python benchmarks/mutants.py src/cmcl/metrics.py tests/test_metrics.py --count 40 --seed 0

Prints the survivors: changes that no test noticed. Each is either equivalent or wants a test.
"""

import argparse
import ast
import copy
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: threads do not survive a fork

import PIL.Image  # noqa: F401  (loaded here once, not in every fork)
import pytest
import scipy.io  # noqa: F401
import sklearn.datasets  # noqa: F401
import torch  # noqa: F401

ROOT = Path(__file__).parents[1]
COMPARE = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq}
COMPARE |= {ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In}
ARITHMETIC = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Pow: ast.Mult}
ARITHMETIC |= {ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd}


def mutations(node):
    """Functions that change a node in place."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARE:
        yield lambda n: n.ops.__setitem__(0, COMPARE[type(n.ops[0])]())
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        yield lambda n: setattr(n, "op", ARITHMETIC[type(n.op)]())
    if isinstance(node, ast.BoolOp):
        yield lambda n: setattr(n, "op", ast.Or() if isinstance(n.op, ast.And) else ast.And())
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield lambda n: setattr(n, "operand", ast.UnaryOp(ast.Not(), n.operand))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield lambda n: setattr(n, "op", ast.UAdd())
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield lambda n: setattr(n, "value", not n.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield lambda n: setattr(n, "value", n.value + 1)
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        yield lambda n: setattr(n, "test", ast.UnaryOp(ast.Not(), n.test))
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield lambda n: setattr(n, "value", ast.Constant(None))
    if isinstance(node, ast.AugAssign):
        yield lambda n: setattr(n, "value", ast.BinOp(n.value, ast.Mult(), ast.Constant(2)))
    if isinstance(node, ast.keyword) and node.arg in ("dim", "reduction", "keepdim", "correction"):
        yield lambda n: setattr(n, "value", ast.Constant(0))


def skipped(tree):
    """Nodes inside messages, annotations and `raise`: wording is not what tests check."""
    parts = [n for n in ast.walk(tree) if isinstance(n, ast.Raise | ast.JoinedStr)]
    parts += [n.annotation for n in ast.walk(tree) if isinstance(n, ast.AnnAssign | ast.arg) and n.annotation]
    parts += [n.returns for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.returns]
    return {node for part in parts for node in ast.walk(part)}


def sites(tree):
    """(position in ast.walk, number of the mutation) of everything that can be changed."""
    left_out = skipped(tree)
    nodes = enumerate(ast.walk(tree))
    return [(i, k) for i, node in nodes if node not in left_out for k, _ in enumerate(mutations(node))]


def mutant(tree, site):
    """The changed source, the line, and that line before and after."""
    changed = copy.deepcopy(tree)
    node = list(ast.walk(changed))[site[0]]
    before = ast.unparse(node)
    list(mutations(node))[site[1]](node)
    ast.fix_missing_locations(changed)
    return ast.unparse(changed), getattr(node, "lineno", 0), before, ast.unparse(node)


def survives(source, module, tests, seconds):
    """Whether the tests pass with the changed module."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "src", Path(folder, "src"), ignore=shutil.ignore_patterns("__pycache__"))
        Path(folder, module).write_text(source)
        # forked, because loading torch and the tools takes longer than most tests
        process = multiprocessing.get_context("fork").Process(target=run_tests, args=(f"{folder}/src", tests))
        process.start()
        process.join(seconds)
        if process.is_alive():
            os.killpg(process.pid, signal.SIGKILL)
            process.join()
        return process.exitcode == 0


def run_tests(sources, tests):
    """Run the tests with the package in the folder `sources`, and exit with pytest's code."""
    os.setpgid(0, 0)
    os.chdir(ROOT)
    os.environ |= {"PYTHONPATH": sources, "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True
    sys.path[:] = [sources, *(path for path in sys.path if path != str(ROOT / "src"))]
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    os._exit(pytest.main(["-xq", "-p", "no:cacheprovider", "-o", f"pythonpath={sources}", *tests]))


def main():
    """Run the mutants that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("module")
    parser.add_argument("tests", nargs="+")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=300, help="a mutant that runs longer is caught")
    options = parser.parse_args()
    tree = ast.parse((ROOT / options.module).read_text())
    found = sites(tree)
    chosen = random.Random(options.seed).sample(found, min(options.count, len(found)))
    if not survives(ast.unparse(tree), options.module, options.tests, options.seconds):
        sys.exit("the tests must pass with the module as it is")
    survivors = 0
    for site in chosen:
        source, line, before, after = mutant(tree, site)
        if survives(source, options.module, options.tests, options.seconds):
            survivors += 1
            print(f"SURVIVED {options.module}:{line}: {before[:100]!r} -> {after[:100]!r}", flush=True)
    print(f"{options.module}: {len(chosen) - survivors} of {len(chosen)} caught, {len(found)} possible")


if __name__ == "__main__":
    main()
