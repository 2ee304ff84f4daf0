"""The command line as a whole: options, help, mistakes, what is loaded, the document that shows it."""

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
from cmcl.cli import common, explore

ROOT = Path(__file__).parents[1]
SOURCE = os.environ | {"PYTHONPATH": str(ROOT / "src")}
OWN = "--logits --network"
RUN = "--device --evaluate-every --json --out --precision --quiet --root --save-every --seed --seeds"
# Every command and option. Whoever changes this list changes what scripts of users rely on.
OPTIONS = {
    "": "--version",
    "demo": "--json --out --quiet --seed --segmentation",
    "list": "--all --json",
    "train": f"{RUN} --batch-size --beta --budget --data --epochs --labels --limit --lr --members --mesh --method --option "
    "--overlap --results --resume --set --sharing --no-sharing --steps --subset --validation",
    "tune": "--betas --device --eta --json --out --overlaps --plot --precision --quiet --root --seeds --set --storage --validation",
    "evaluate": f"{OWN} --batch-size --data --device --flip --no-flip --json --limit --ood --ood-option --ood-root --option --root",
    "predict": f"{OWN} --device --flip --no-flip --from --json --resize --root --threshold --workers",
    "calibrate": f"{OWN} --confidence --data --device --json --limit --option --out --risk --root --score",
    "export": f"{OWN} --example --format --json --limit --out --root",
    "layers": "--input --json --option --tokens --usable",
    "reproduce": f"{RUN} --budget --dry-run --jobs --launcher --part --results --search --slurm --status --unfinished",
    "report": "--format --out",
    "data list": "--json",
    "data fetch": "--root --site",
    "data check": "--json --option --root --seed --validation",
}


def python_m_cmcl(*arguments, **more):
    command = [sys.executable, "-m", "cmcl", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=SOURCE, **more)


@pytest.mark.parametrize("command", OPTIONS)
def test_options_are_frozen(cmcl, command):
    code, out, err = cmcl(*command.split(), "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"Usage: cmcl {command}".rstrip())
    found = set(re.findall(r"(?<![\w`-])--[a-z][a-z-]*", out.split("Options:")[1])) - {"--help"}
    named = {
        word for word in found if re.search(rf"^ +(-\w, +)?{word}\b|(, |/ ?| / ){word}\b", out, re.MULTILINE)
    }
    assert named == set(OPTIONS[command].split())
    assert cmcl(*command.split(), "-h")[1] == out


def test_commands_are_frozen(cmcl):
    """Each has a whole line in the help, and a row in the document."""
    lines = {
        line.split()[0]: line for line in cmcl("--help")[1].split("Commands:")[1].splitlines() if line.strip()
    }
    commands = {command.split()[0] for command in OPTIONS if command}
    assert set(lines) == commands
    assert all(line.endswith(".") and "..." not in line for line in lines.values())
    documented = (ROOT / "docs" / "reference" / "commands.md").read_text()
    assert all(f"| `cmcl {command}" in documented for command in commands)


@pytest.mark.parametrize("command", [[], ["data"]])
def test_a_bare_command_shows_its_help(cmcl, command):
    code, out, err = cmcl(*command)
    assert code == 2
    assert (out + err).strip() == cmcl(*command, "--help")[1].strip()


def test_version(cmcl):
    assert cmcl("--version") == (0, f"cmcl {__version__}\n", "")


@pytest.mark.parametrize("arguments", [["--help"], ["train", "digits-cmlc"]])
def test_python_m_cmcl_is_the_command(cmcl, arguments):
    result = python_m_cmcl(*arguments)
    assert (result.returncode, result.stdout, result.stderr) == cmcl(*arguments)


HEAVY = {"torch", "numpy", "scipy", "PIL", "sklearn", "altair"}


@pytest.mark.parametrize(
    ("arguments", "heavy"),
    [
        (["--help"], HEAVY | {"pydantic", "rich"}),
        (["--version"], HEAVY | {"pydantic", "rich"}),
        (["train", "--help"], HEAVY),
        (["data", "--help"], HEAVY),
        (["list"], HEAVY),
        (["data", "list"], HEAVY),
        (["reproduce", "--status", "--results", str(ROOT / "results")], HEAVY),
        (["train", "digits-cmlc"], HEAVY),
    ],
)
def test_help_and_lists_load_nothing_heavy(arguments, heavy):
    code = (
        "import sys; sys.argv = ['cmcl', *sys.argv[1:]]\n"
        "from cmcl.cli import main\n"
        "try: main()\n"
        "finally: print('loaded:', *sys.modules)"
    )
    command = [sys.executable, "-c", code, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, env=SOURCE)
    assert not heavy & set(result.stdout.splitlines()[-1].split())


def test_a_closed_pipe_ends_quietly():
    """`cmcl list | head -1`."""
    words = [sys.executable, "-m", "cmcl", "list", "--all"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=SOURCE) as process:
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


class TestList:
    def test_has_everything(self, cmcl):
        from cmcl.data import DATASETS
        from cmcl.networks import NETWORKS
        from cmcl.reproduction import RECIPES

        found = json.loads(cmcl("list", "--json")[1])
        assert [entry["name"] for entry in found["recipes"]] == list(RECIPES)
        assert [entry["name"] for entry in found["networks"]] == list(NETWORKS)
        assert [entry["name"] for entry in found["data"]] == list(DATASETS)
        assert all(entry["description"] for entries in found.values() for entry in entries)
        assert {recipe["group"] for recipe in found["recipes"]} == set(explore.GROUPS)
        recipes = {entry["name"]: entry for entry in found["recipes"]}
        resnet = recipes["cifar10-resnet20-cmcl"]
        assert resnet["paper"] == {"oracle": 2.79, "top1": 8.75}, "Table 3"
        assert resnet["cells"] == ["table3/cifar10-resnet20-cmcl", "fig4a/cifar10-resnet20-m5-cmcl"]
        assert recipes["digits-ie"]["paper"] is None

    def test_the_grid_is_behind_all(self, cmcl):
        short, whole = cmcl("list", "recipes")[1], cmcl("list", "recipes", "--all")[1]
        (row,) = [line for line in short.splitlines() if line.startswith("cifar10-resnet20-ie ")]
        assert row.split() == ["cifar10-resnet20-ie", "independent", "ensemble,", "M=5", "10.18", "3.83"]
        assert "cifar10-cnn-m10-cmcl-k4" not in short
        assert "cifar10-cnn-m10-cmcl-k4" in whole
        assert "--all" in short
        assert "recipe" not in cmcl("list", "data")[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["list", "recipe"], "Did you mean 'recipes'?"),
        (["train", "digits-cmlc"], "Did you mean 'digits-cmcl'?"),
        (["train", "digits-cmcl", "--overlap", "9"], "overlap"),
        (["train", "digits-cmcl", "--set", "member=3"], "Did you mean 'members'?"),
        (["train", "digits-cmcl", "--set", "lr=fast"], "lr"),
        (["train", "digits-cmcl", "--set", "lr=1e400"], "lr"),
        (["train", "digits-cmcl", "--set", "beta=1e400"], "beta"),
        (["train", "digits-cmcl", "--set", f"lr={'9' * 5000}"], "lr"),
        (["train", "digits-cmcl", "--set", f"milestones={'[' * 99999}"], "milestones"),
        (["train", "digits-cmcl", "--set", "lr"], "--set must look like NAME=VALUE. Got 'lr'."),
        (["train", "digits-cmcl", "--set", "members=true"], "members"),
        (["train", "digits-cmcl", "--labels", "random"], "labels"),
        (["train", "digits-cmcl", "--device", "abacus"], "device must be"),
        (["train", "digits-cmcl", "--precision", "half"], "precision must be"),
        (["train", "digits-cmcl", "--budget", "soon"], "such as 90s, 25m or 1h30m. Got 'soon'."),
        (["train", "digits-cmcl", "--seed", "12345678901234567890123"], "seed must be"),
        (["train", "digits-cmcl", "--seed", "-1"], "seed must be"),
        (["reproduce", "fig1", "--seed", "12345678901234567890123"], "seed must be"),
        (["demo", "--out", "HERE", "--seed", "12345678901234567890123"], "seed must be"),
        (["data", "check", "digits", "--seed", "12345678901234567890123"], "seed must be"),
        (["layers", "cnn", "--input", "99999999999999999999"], "--input must be"),
        (["layers", "cnn", "--tokens", "99999999999999999999"], "--tokens"),
        (["train", "cifar10-cnn-ie", "--root", "HERE", "--out", "HERE"], "cmcl data fetch cifar10"),
        (["evaluate", "HERE/nothing"], "must be a run folder of `cmcl train` or a saved ensemble"),
        (["evaluate", "HERE/rnus"], "Did you mean 'runs'?"),
        (["predict", "HERE", "HERE/cat.png"], "cat.png must be an image file"),
        (["export", "HERE", "-o", "HERE/model"], "--out must end in .onnx or .pt2"),
        (["export", "HERE", "-o", "HERE/m.pt2", "--format", "onnx"], "the suffix of --format onnx"),
        (["reproduce"], "name what to reproduce: table1"),
        (["reproduce", "tabel1"], "Did you mean 'table1'?"),
        (["reproduce", "table1", "--part", "3/2"], "--part must look like 2/3"),
        (["reproduce", "table3", "--search", "tset"], "Did you mean 'test'?"),
        (["reproduce", "fig1c", "--search", "heldout"], "must have a CMCL recipe"),
        (["report", "HERE/rnus"], "Did you mean 'runs'?"),
        (["report", "--format", "htm"], "Did you mean 'html'?"),
        (["demo", "--sed", "1"], "No such option"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(mistake, tmp_path, arguments, message):
    (tmp_path / "runs").mkdir()
    assert message in mistake(*(argument.replace("HERE", str(tmp_path)) for argument in arguments))


def test_a_fault_of_ours_keeps_its_traceback(cmcl, monkeypatch):
    def broken(*_):
        raise RuntimeError("ours")

    monkeypatch.setattr(explore, "_everything", broken)
    monkeypatch.setattr(sys, "argv", ["cmcl", "list"])
    with pytest.raises(RuntimeError, match="ours"):
        cli.main()


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
@pytest.mark.parametrize("place", ["file", "file/deep/runs", "locked/runs", "dead", "dead/runs"])
def test_a_folder_that_cannot_be_written_raises_before_the_work(mistake, tmp_path, monkeypatch, words, place):
    (tmp_path / "file").touch()
    (tmp_path / "locked").mkdir()
    (tmp_path / "dead").symlink_to(tmp_path / "gone")
    monkeypatch.setattr("cmcl.data.load", pytest.fail)
    monkeypatch.setattr("cmcl.report.write", pytest.fail)
    # root, as whom tests may run, may write everywhere
    monkeypatch.setattr("os.access", lambda path, mode: mode != os.W_OK or "locked" not in str(path))
    err = mistake(*(word.replace("HERE", str(tmp_path)) for word in words), tmp_path / place)
    problem = {"file": "is a file", "locked": "no permission", "dead": "is a link to nowhere"}[
        place.split("/")[0]
    ]
    assert str(tmp_path / place) in err
    assert problem in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dead", "file", "locked"]


@pytest.mark.parametrize(
    ("place", "problem"),
    [
        (".", "a folder"),
        ("pipe", "a device"),
        ("file/r.html", "is a file"),
        ("locked/new.html", "no permission"),
    ],
)
def test_a_file_that_cannot_be_written_raises_before_the_work(mistake, tmp_path, monkeypatch, place, problem):
    (tmp_path / "locked").mkdir()
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr("cmcl.report.write", pytest.fail)
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path / "locked")
    assert problem in mistake("report", tmp_path, "-o", tmp_path / place)


def test_a_campaign_without_its_data_says_how_to_fetch_them(cmcl, tmp_path):
    code, out, err = cmcl("reproduce", "table1", "--root", tmp_path, "--out", tmp_path, "--results", tmp_path)
    assert (code, err.count("\n")) == (2, 1)
    assert "cifar10-cnn-cmcl seed 0: started" in out
    assert "cmcl data fetch cifar10" in err


def test_a_finished_campaign_needs_no_writable_folder(cmcl, tmp_path):
    (tmp_path / "file").touch()
    done = ("reproduce", "fig1", "--results", ROOT / "results", "--out", tmp_path / "file")
    assert cmcl(*done)[0] == 0


def test_tables(capsys, monkeypatch):
    common.print_table(("name", ">n", ""), [("a", 10, "x"), ("long", None, "")], title="Title of all")
    assert capsys.readouterr().out == "Title of all\nname   n\na     10  x\nlong   -\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "40")
    name = "a-name-of-more-than-thirty-letters"
    common.print_table(("name", "text"), [(name, "one two six")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith(name), "names stay whole"
    assert len(lines) == 4, "and the text is folded"
    common.print_table(("name", ">n"), [(name, "12345678901234567")])
    lines = capsys.readouterr().out.splitlines()
    assert "12345678901234567" in lines[1], "numbers always stay whole"
    assert len(lines) == 3
    means = [f"{i}5.00 ± 1.00" for i in range(5)]
    common.print_table(("seed", *[">n"] * 5), [("mean", *means)])
    assert capsys.readouterr().out.splitlines()[1] == "  ".join(["mean", *means]), "in a narrow terminal too"


def test_the_best_row_of_a_table_is_bold_on_a_terminal(capsys, monkeypatch):
    rows = [("a", "2.50"), ("b", None), ("c", "2.40"), ("d", "10.00")]
    common.print_table(("name", ">error %"), rows, best=1)
    assert "\x1b" not in capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    common.print_table(("name", ">error %"), rows, best=1)
    _, *lines = capsys.readouterr().out.splitlines()
    assert ["\x1b[1m" in line for line in lines] == [False, False, True, False]


@pytest.mark.parametrize(
    ("ece", "start"), [(0.0, "The prob"), (4.9, "The prob"), (37.7, "ECE 37.7 %: near-uniform members make ")]
)
def test_a_high_ece_is_explained_with_the_next_command(capsys, ece, start):
    common.say_unscaled("runs/x", "digits", ece=ece)
    line, command = capsys.readouterr().out.splitlines()
    assert line.startswith(start)
    assert line.endswith("Fit a temperature:")
    assert len(line) <= 80
    assert command == "cmcl calibrate runs/x --data digits"


def test_text_is_wrapped_to_the_terminal(capsys, monkeypatch):
    text = "word " * 20
    common.note(text)
    assert capsys.readouterr().err.count("\n") == 1
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "40")
    common.note(text)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert max(map(len, lines)) <= 40


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


@pytest.mark.parametrize(("page", "least"), [("reference/commands.md", 6), ("start/install.md", 1)])
def test_the_document_shows_what_happens(cmcl, tmp_path, monkeypatch, page, least):
    """Every command of the page that is followed by its output, in order, in an empty folder.

    "..." in the document stands for anything; numbers that training makes are written so.
    """
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / page).read_text()
    shown = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    assert len(shown) >= least
    for block in shown:
        for command, expected in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE):
            words = shlex.split(command.split("  #")[0])
            if words[0] != "cmcl":
                subprocess.run([sys.executable, *words[1:]], check=True, cwd=tmp_path)
                continue
            _, out, err = cmcl(*_globbed(words[1:]))
            lines = ("[^\n]*".join(map(re.escape, line.split("..."))) for line in expected.splitlines())
            pattern = "\n".join(r"[^\n]*(?:\n[^\n]*)*" if line == "[^\n]*" else line for line in lines)
            found = "\n".join(line.rstrip() for line in (err + out).splitlines())
            assert re.fullmatch(pattern, found), f"$ {command}\n{found}"


def _globbed(words):
    """As a shell does it: runs/digits-* becomes the folders of that kind."""
    for word in words:
        yield from map(str, sorted(Path().glob(word))) if "*" in word else [word]
