"""The commands as a whole: help, mistakes, what is loaded, the document that shows them."""

import json
import os
import re
import shlex
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from cmcl import __version__, cli
from cmcl._files import replacing
from cmcl.cli.listing import NETWORKS
from cmcl.cli.shared import print_table

ROOT = Path(__file__).parents[1]
COMMANDS = [*cli.COMMANDS, "data"]


@pytest.mark.parametrize("command", [[], *([c] for c in COMMANDS), ["data", "check"]])
def test_help(cmcl, command):
    code, out, err = cmcl(*command, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"Usage: {' '.join(['cmcl', *command])}")


def test_the_first_lines_of_help_are_whole(cmcl):
    """A line that ends in dots tells half of what the command does."""
    _, out, _ = cmcl("--help")
    lines = [line.strip() for line in out.split("Commands:")[1].splitlines() if line.strip()]
    assert set(COMMANDS) <= {line.split()[0] for line in lines}
    for line in lines:
        if line.split()[0] in COMMANDS:
            assert line.endswith("."), line
            assert not line.endswith("..."), line
    documented = (ROOT / "docs" / "commands.md").read_text()
    assert all(f"| `cmcl {command}" in documented for command in COMMANDS)
    assert "..." not in cmcl("data", "--help")[1].split("Commands:")[1]


def test_who_has_json(cmcl):
    """All but those that the document names."""
    commands = [[name] for name in cli.COMMANDS] + [["data", name] for name in ("list", "fetch", "check")]
    without = [" ".join(words) for words in commands if "--json" not in cmcl(*words, "--help")[1]]
    assert without == ["report", "data fetch"]
    text = " ".join((ROOT / "docs" / "commands.md").read_text().split())
    assert "every command has it but `report` and `data fetch`," in text


@pytest.mark.parametrize("command", [[], ["data"]])
def test_a_bare_command_shows_its_help(cmcl, command):
    code, out, err = cmcl(*command)
    assert code == 2
    assert (out + err).strip() == cmcl(*command, "--help")[1].strip()


def test_version(cmcl):
    assert cmcl("--version") == (0, f"cmcl {__version__}\n", "")


@pytest.mark.parametrize("arguments", [["--help"], ["list", "--json"], ["train", "digits-cmlc"]])
def test_python_m_cmcl_is_the_command(cmcl, arguments):
    """For those whose PATH does not have it."""
    command = [sys.executable, "-m", "cmcl", *arguments]
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    result = subprocess.run(command, capture_output=True, text=True, env=env)
    assert (result.returncode, result.stdout, result.stderr) == cmcl(*arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        *(["--help"], ["--version"], ["train", "--help"], ["data", "--help"]),
        *(["list"], ["list", "--json"], ["data", "list"]),
        *(["reproduce", "--status", "--results", str(ROOT / "results")], ["train", "digits-cmlc"]),
    ],
)
def test_help_and_lists_load_nothing_heavy(arguments):
    code = (
        "import sys; sys.argv = ['cmcl', *sys.argv[1:]]\n"
        "from cmcl.cli import main\n"
        "try: main()\n"
        "finally: print('heavy:', sorted({'torch', 'numpy', 'scipy', 'PIL', 'sklearn', 'altair'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, *arguments]
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    result = subprocess.run(command, capture_output=True, text=True, env=env)
    assert result.stdout.splitlines()[-1] == "heavy: []"


def test_list_has_everything(cmcl):
    from cmcl.data import DATASETS
    from cmcl.reproduction import RECIPES

    code, out, _ = cmcl("list", "--json")
    found = json.loads(out)
    assert code == 0
    assert [entry["name"] for entry in found["recipes"]] == list(RECIPES)
    assert [entry["name"] for entry in found["data"]] == list(DATASETS)
    resnet = next(entry for entry in found["recipes"] if entry["name"] == "cifar10-resnet20-cmcl")
    assert resnet["paper"] == {"oracle": 2.79, "top1": 8.75}, "Table 3"
    assert resnet["cells"] == ["table3/cifar10-resnet20-cmcl", "fig4a/cifar10-resnet20-m5-cmcl"]
    assert next(entry for entry in found["recipes"] if entry["name"] == "digits-ie")["paper"] is None


def test_the_networks_of_the_list_exist():
    from cmcl.networks import NETWORKS as EXISTING

    assert list(NETWORKS) == list(EXISTING)


def test_list_for_people(cmcl):
    code, out, _ = cmcl("list")
    row = next(line.split() for line in out.splitlines() if line.startswith("cifar10-resnet20-ie "))
    assert code == 0
    assert row == ["cifar10-resnet20-ie", "5", "5", "10.18", "3.83", "table3"]
    assert "two convolutions" in cmcl("list", "networks")[1]
    assert "recipe" not in cmcl("list", "data")[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["list", "recipe"], "Did you mean 'recipes'?"),
        (["train", "digits-cmlc"], "Did you mean 'digits-cmcl'?"),
        (["train", "digits-cmcl", "--overlap", "9"], "overlap must be between 1 and 5. Got 9."),
        (["train", "digits-cmcl", "--set", "member=3"], "Did you mean 'members'?"),
        (
            ["train", "digits-cmcl", "--set", "lr=fast"],
            "lr must be valid: input should be a valid number. Got 'fast'.",
        ),
        (["train", "digits-cmcl", "--set", "lr"], "--set must look like NAME=VALUE. Got 'lr'."),
        (
            ["train", "digits-cmcl", "--set", "members=true"],
            "members must be valid: input should be a valid integer. Got True.",
        ),
        (
            ["train", "digits-cmcl", "--labels", "random"],
            "labels must be valid: input should be 'exact' or 'sampled'. Got 'random'.",
        ),
        (["train", "digits-cmcl", "--device", "abacus"], "--device must be auto, cpu, cuda or cuda:1."),
        (["train", "digits-cmcl", "--precision", "half"], "precision must be valid"),
        (["train", "digits-cmcl", "--budget", "soon"], "such as 90s, 25m or 1h30m. Got 'soon'."),
        (["train", "cifar10-cnn-ie", "--root", "HERE", "--out", "HERE"], "cmcl data fetch cifar10"),
        (["evaluate", "HERE/nothing"], "must be a run folder of `cmcl train` or a saved ensemble"),
        (["evaluate", "HERE/rnus"], "Did you mean 'runs'?"),
        (["predict", "HERE", "HERE/cat.png"], "cat.png must be an image file or a folder of images. Got no"),
        (["reproduce"], "name what to reproduce: table1"),
        (["reproduce", "tabel1"], "Did you mean 'table1'?"),
        (["reproduce", "table1", "--cells", "3/2"], "--cells must look like 2/3"),
        (["reproduce", "--status", "--cells", "4/3"], "--cells must look like 2/3"),
        (["reproduce", "table3", "--search", "tset"], "Did you mean 'test'?"),
        (["reproduce", "fig1c", "--search", "heldout"], "must have a CMCL recipe to search"),
        (
            ["reproduce", "table1", "--root", "HERE", "--out", "HERE", "--results", "HERE"],
            "data fetch cifar10",
        ),
        (["report", "HERE/rnus"], "Did you mean 'runs'?"),
        (["report", "--format", "htm"], "Did you mean 'html'?"),
        (["demo", "--sed", "1"], "No such option"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(cmcl, tmp_path, arguments, message):
    (tmp_path / "runs").mkdir()
    code, _, err = cmcl(*(argument.replace("HERE", str(tmp_path)) for argument in arguments))
    assert code == 2
    assert err.startswith("cmcl: ")
    assert err.count("\n") == 1
    assert message in err


WRITERS = {  # what each command writes to
    "train": ["train", "digits-cmcl", "--out"],
    "train, records": ["train", "digits-cmcl", "--out", "HERE/runs", "--results"],
    "tune": ["tune", "digits-cmcl", "--out"],
    "demo": ["demo", "--out"],
    "reproduce": ["reproduce", "table1", "--results", "HERE/results", "--out"],
    "reproduce, records": ["reproduce", "table1", "--out", "HERE/runs", "--results"],
    "figures": ["report", "HERE", "--format", "svg", "-o"],
}


@pytest.mark.parametrize("words", WRITERS.values(), ids=WRITERS)
@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("HERE/file", "must name a folder. Got the file HERE/file. Name another."),
        ("HERE/file/deep/runs", "must name a folder. Got HERE/file/deep/runs, but HERE/file is a file."),
        (
            "HERE/locked/runs",
            "must be a place to write to. Got HERE/locked/runs: no permission to write HERE",
        ),
    ],
)
def test_a_folder_that_cannot_be_written_is_told_before_the_work(
    cmcl, tmp_path, monkeypatch, words, place, message
):
    (tmp_path / "file").touch()
    (tmp_path / "locked").mkdir()
    monkeypatch.setattr("cmcl.data.load", pytest.fail)
    monkeypatch.setattr("cmcl.report.write", pytest.fail)
    # root, as whom tests may run, may write everywhere
    monkeypatch.setattr("os.access", lambda path, mode: mode != os.W_OK or "locked" not in str(path))
    code, out, err = cmcl(*(word.replace("HERE", str(tmp_path)) for word in (*words, place)))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message.replace("HERE", str(tmp_path)) in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "locked"]


def test_links_to_nowhere_and_what_is_no_file_are_told(cmcl, tmp_path):
    (tmp_path / "dead").symlink_to(tmp_path / "gone")
    for place in ("dead", "dead/runs"):
        code, _, err = cmcl("train", "digits-ie", "--out", tmp_path / place)
        assert code == 2
        assert f"{tmp_path / 'dead'} is a link to nowhere" in err
    os.mkfifo(tmp_path / "pipe")
    code, _, err = cmcl("report", tmp_path, "-o", tmp_path / "pipe")
    assert (code, "must name a file, which is replaced" in err) == (2, True)
    with pytest.raises(ValueError, match="must be a file to be replaced"), replacing(tmp_path / "pipe"):
        pass
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with replacing(tmp_path / "link") as part:
        part.write_text("through")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "through"


def test_a_run_folder_elsewhere_and_a_finished_campaign_need_no_room_here(cmcl, tmp_path, monkeypatch):
    here = tmp_path / "locked"
    assert cmcl("train", "digits-ie", "--epochs", 1, "--out", here)[0] == 0
    (folder,) = here.iterdir()
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    monkeypatch.setattr("os.access", lambda path, mode: mode != os.W_OK or Path(path) != here)
    assert cmcl("train", "digits-ie", "--epochs", 1, "--out", here, "--resume")[0] == 0
    (tmp_path / "file").touch()
    done = ("reproduce", "fig1", "--results", ROOT / "results", "--out", tmp_path / "file")
    assert cmcl(*done)[0] == 0


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("HERE", "--out must name a file. Got the folder HERE."),
        ("HERE/file/r.html", "--out must name a file in a folder. Got HERE/file/r.html, but HERE/file is a"),
        ("HERE/locked/new.html", "Got HERE/locked/new.html: no permission to write HERE/locked."),
        ("HERE/locked/old.html", "Got HERE/locked/old.html: no permission to write HERE/locked."),
    ],
)
def test_a_report_that_cannot_be_written(cmcl, tmp_path, monkeypatch, place, message):
    (tmp_path / "locked").mkdir()
    for name in ("file", "locked/old.html"):
        (tmp_path / name).touch()
    monkeypatch.setattr("cmcl.report.write", pytest.fail)
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path / "locked")
    code, _, err = cmcl("report", tmp_path, "-o", place.replace("HERE", str(tmp_path)))
    assert (code, err.count("\n")) == (2, 1)
    assert message.replace("HERE", str(tmp_path)) in err


def test_tables(capsys, monkeypatch):
    print_table(("name", ">n", ""), [("a", 10, "x"), ("long", None, "")], title="Title of all")
    assert capsys.readouterr().out == "Title of all\nname   n\na     10  x\nlong   -\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "40")
    print_table(("name", ">n"), [("a-name-of-more-than-thirty-letters", "one two three")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("a-name-of-more-than-thirty-letters"), "names stay whole"
    assert len(lines) == 4, "and the rest is folded"


def test_warnings_are_one_line_too(capsys, monkeypatch):
    def warn(**_):
        warnings.warn("figure 2 goes\n  without", stacklevel=1)

    monkeypatch.setattr(cli, "app", warn)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        with pytest.raises(SystemExit) as stopped:
            cli.main()
    assert stopped.value.code == 0
    assert capsys.readouterr().err == "cmcl: figure 2 goes without\n"


def test_ctrl_c(monkeypatch):
    def stop(**_):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "app", stop)
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 130


def test_the_document_shows_what_happens(cmcl, tmp_path, monkeypatch):
    """Every command of docs/commands.md that is followed by its output, in order, in an empty folder.

    "..." in the document stands for anything; numbers that training makes are written so.
    """
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "commands.md").read_text()
    shown = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    assert len(shown) > 5
    for block in shown:
        for command, expected in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE):
            words = shlex.split(command.split("  #")[0])
            if words[0] != "cmcl":
                subprocess.run([sys.executable, *words[1:]], check=True, cwd=tmp_path)
                continue
            _, out, err = cmcl(*_globbed(words[1:], tmp_path))
            lines = ("[^\n]*".join(map(re.escape, line.split("..."))) for line in expected.splitlines())
            pattern = "\n".join(r"[^\n]*(?:\n[^\n]*)*" if line == "[^\n]*" else line for line in lines)
            found = "\n".join(line.rstrip() for line in (err + out).splitlines())
            assert re.fullmatch(pattern, found), f"$ {command}\n{found}"


def _globbed(words, folder):
    """As a shell would: runs/digits-* becomes the one folder of that kind."""
    for word in words:
        yield from map(str, sorted(Path().glob(word))) if "*" in word else [word]
