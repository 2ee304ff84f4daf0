"""For all tests."""

import os
import sys

# One thread, here and in the processes that tests start: for layers this small a second one is slower, and many
# times so when the machine has other work. Before anything imports torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from cmcl import cli


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory):
    """What is preprocessed goes to a folder of this test run, never to the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CMCL_CACHE", str(tmp_path_factory.getbasetemp() / "cmcl-cache"))
        yield


@pytest.fixture(autouse=True)
def same_draws():
    """A test draws the same numbers whatever ran before it in its process: what fails, fails again."""
    torch.manual_seed(0)


@pytest.fixture
def cmcl(capsys, monkeypatch):
    """Run the command line in this process: (exit code, stdout, stderr)."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["cmcl", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        return stopped.value.code, *capsys.readouterr()

    return run


@pytest.fixture
def mistake(cmcl):
    """The message of a command that must fail by a user's mistake: one line, exit code 2 and no output."""

    def run(*arguments):
        code, out, err = cmcl(*arguments)
        assert (code, out, err.count("\n")) == (2, "", 1), err
        assert err.startswith("cmcl: ")
        return err

    return run


@pytest.fixture
def without_altair(monkeypatch):
    """As if the extra `report` were not installed."""
    import cmcl.report

    monkeypatch.setitem(sys.modules, "altair", None)
    for name in ("page", "figures"):
        monkeypatch.delitem(sys.modules, f"cmcl.report.{name}", raising=False)
        monkeypatch.delattr(cmcl.report, name, raising=False)
