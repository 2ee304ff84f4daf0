"""Telemetry without gaps or doubles, an alarm worked out by hand, and progress as a person sees it."""

import io
import json
import math
import re
import subprocess
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from cmcl._files import DiskFullError, replacing
from cmcl.training import progress
from cmcl.training.progress import Progress
from cmcl.training.telemetry import DeadMembers, Telemetry

ROW = {"epoch": 3, "loss": 1.23456, "lr": 0.05, "images_per_second": 51234.5, "top1": 10.181, "oracle": 3.83}


def epochs(path):
    return [json.loads(line)["epoch"] for line in path.read_text().splitlines()]


@pytest.fixture
def written(tmp_path):
    path = tmp_path / "run" / "telemetry.jsonl"
    told = Telemetry(path)
    for epoch in range(1, 6):
        told.write({"epoch": epoch, "loss": 1 / epoch})
    return path


class TestLines:
    def test_one_a_row_on_the_disk_at_once(self, tmp_path):
        path = tmp_path / "telemetry.jsonl"
        told = Telemetry(path)
        for epoch in (1, 2):
            told.write({"epoch": epoch, "wins": [0.25, 0.75], "name": "é\u2028"})
            assert epochs(path) == list(range(1, epoch + 1))
        assert json.loads(path.read_text().splitlines()[0]) == {
            "epoch": 1,
            "wins": [0.25, 0.75],
            "name": "é\u2028",
        }

    def test_no_path_no_file(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        told = Telemetry(None)
        told.rewind(0)
        told.write(ROW)
        assert not list(tmp_path.iterdir())

    def test_numbers_that_json_does_not_have(self, tmp_path):
        told = Telemetry(tmp_path / "t.jsonl")
        told.write({"epoch": 1, "loss": math.nan, "norms": {"a": [math.inf, 1.5]}, "wins": (-math.inf,)})
        assert json.loads((tmp_path / "t.jsonl").read_text(), parse_constant=pytest.fail) == {
            "epoch": 1,
            "loss": None,
            "norms": {"a": [None, 1.5]},
            "wins": [None],
        }

    def test_a_full_disk(self, written, monkeypatch):
        def full(*_, **__):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(type(written), "open", full)
        with pytest.raises(DiskFullError, match=r"telemetry.jsonl must fit on its disk.*Free some space"):
            Telemetry(written).write(ROW)


class TestRewind:
    @pytest.mark.parametrize("epoch", [0, 1, 3, 5, 9])
    def test_drops_what_came_after(self, written, epoch):
        told = Telemetry(written)
        told.rewind(epoch)
        assert epochs(written) == list(range(1, min(epoch, 5) + 1))
        told.write({"epoch": epoch + 1})
        assert epochs(written)[-2:] == ([epoch, epoch + 1] if 0 < epoch <= 5 else epochs(written)[-2:])

    def test_from_the_middle_of_an_epoch(self, written):
        Telemetry(written).rewind(2.5)
        assert epochs(written) == [1, 2]

    @pytest.mark.parametrize("cut", range(1, 24))
    def test_a_torn_last_line(self, written, cut):
        written.write_bytes(written.read_bytes()[:-cut])
        whole = [1, 2, 3, 4, 5] if cut == 1 else [1, 2, 3, 4]  # all but the line's end is there
        told = Telemetry(written)
        told.rewind(5)
        assert epochs(written) == whole
        told.write({"epoch": 6})
        assert epochs(written) == [*whole, 6]

    @pytest.mark.parametrize(
        "line", [b"\xff\xfe", b"\0\0\0", b"7", b"[]", b"null", b'{"loss": 1}', b'{"epoch": null}']
    )
    def test_lines_that_are_no_rows(self, written, line):
        written.write_bytes(written.read_bytes() + line + b"\n")
        Telemetry(written).rewind(3)
        assert epochs(written) == [1, 2, 3]

    def test_nothing_written_yet(self, tmp_path):
        Telemetry(tmp_path / "t.jsonl").rewind(3)
        assert not list(tmp_path.iterdir())

    def test_is_all_or_nothing(self, written, monkeypatch):
        def killed(handle):
            raise KeyboardInterrupt

        monkeypatch.setattr("os.fsync", killed)
        with pytest.raises(KeyboardInterrupt):
            Telemetry(written).rewind(2)
        assert epochs(written) == [1, 2, 3, 4, 5]
        assert list(written.parent.iterdir()) == [written]


def test_opening_removes_what_a_kill_left(written):
    rewinding = replacing(written)
    part = rewinding.__enter__()  # and no exit
    part.write_text("half")
    other = written.parent / ".other.jsonl.x.part"
    other.touch()
    Telemetry(written)
    assert sorted(written.parent.iterdir()) == [other, written]
    assert epochs(written) == [1, 2, 3, 4, 5]


def shown(folder):
    """What TensorBoard reads from its folder: {(name, step): value}."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {
        (name, event.step): event.value for name in events.Tags()["scalars"] for event in events.Scalars(name)
    }


def write_many(folder):
    told = Telemetry(None, tensorboard=folder)
    for epoch in range(1, 1000):
        told.write({"epoch": epoch, "wins": [0.5] * 100})


@contextmanager
def small_disk(folder):
    try:
        mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder]
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs the right to mount a small disk")
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


@contextmanager
def small_files(folder):
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64_000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.filterwarnings("ignore")  # what TensorBoard's own imports say is not ours to mend
class TestTensorBoard:
    @pytest.fixture(autouse=True)
    def installed(self):
        pytest.importorskip("tensorboard")

    def test_scalars_only_and_by_name(self, tmp_path):
        told = Telemetry(None, tensorboard=tmp_path / "runs" / "board")
        told.write(
            {
                "epoch": 2,
                "loss": 0.5,
                "wins": [0.25, 0.75],
                "parts": {"task": 1, "kl": [2.0]},
                "name": "7",
                "warm": True,
                "top1": None,
            }
        )
        assert shown(tmp_path / "runs" / "board") == {
            ("loss", 2): 0.5,
            ("wins/0", 2): 0.25,
            ("wins/1", 2): 0.75,
            ("parts/task", 2): 1,
            ("parts/kl/0", 2): 2.0,
        }

    def test_repeats_are_told_apart(self, tmp_path):
        told = Telemetry(None, tensorboard=tmp_path)
        for seed in (0, 1):
            told.write({"epoch": 1, "seed": seed, "loss": float(seed)})
        assert shown(tmp_path) == {("seed-0/loss", 1): 0.0, ("seed-1/loss", 1): 1.0}

    def test_a_part_of_an_epoch_counts_up(self, tmp_path):
        Telemetry(None, tensorboard=tmp_path).write({"epoch": 2.5, "loss": 1.0})
        assert shown(tmp_path) == {("loss", 3): 1.0}

    def test_numbers_that_json_does_not_have(self, tmp_path):
        Telemetry(None, tensorboard=tmp_path).write({"epoch": 1, "loss": math.inf})
        assert shown(tmp_path) == {("loss", 1): math.inf}

    @pytest.mark.parametrize("resumed", [False, True])
    def test_rewinding_hides_what_came_after(self, tmp_path, resumed):
        told = Telemetry(None, tensorboard=tmp_path)
        for epoch in (1, 2, 3, 4):
            told.write({"epoch": epoch, "wins": [0.5, epoch]})
        told = Telemetry(None, tensorboard=tmp_path) if resumed else told
        told.rewind(2.5)
        assert {step for _, step in shown(tmp_path)} == {1, 2}
        told.write({"epoch": 3, "wins": [0.5, 33.0]})
        rows = shown(tmp_path)
        assert {step: rows[name, step] for name, step in rows if name == "wins/1"} == {1: 1, 2: 2, 3: 33}

    def test_not_installed(self, monkeypatch, tmp_path):
        monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
        with pytest.raises(ImportError, match="Install it with: pip install tensorboard"):
            Telemetry(None, tensorboard=tmp_path)

    @pytest.mark.parametrize("room", [small_disk, small_files])
    @pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
    def test_a_full_disk(self, tmp_path, room):
        """The row that does not fit is an error of its own `write`; those before it can be read."""
        with room(tmp_path):
            cure = "Free some space" if room is small_disk else "Raise the limit"
            with pytest.raises(DiskFullError, match=rf"events.out.tfevents.* must fit .*{cure}"):
                write_many(tmp_path)
            steps = {step for _, step in shown(tmp_path)}
            assert steps == set(range(1, len(steps) + 1))
            assert 10 < len(steps) < 100  # of some 2 kB each

    def test_a_disk_full_from_the_start(self, tmp_path):
        with small_disk(tmp_path):
            with pytest.raises(OSError, match="No space"):
                (tmp_path / "other").write_bytes(bytes(100_000))
            with pytest.raises(DiskFullError, match="events.out.tfevents"):
                Telemetry(None, tensorboard=tmp_path)


class TestDeadMembers:
    # 4 members, overlap 1: the fair share is 0.25, a tenth of it 0.025.
    def test_after_three_epochs_and_once(self):
        alarm = DeadMembers(4, 1)
        rates = [0.5, 0.4, 0.08, 0.02]
        assert [alarm.update(rates) for _ in range(6)] == [[], [], [3], [], [], []]

    def test_again_only_after_it_recovered(self):
        alarm = DeadMembers(2, 1, patience=2)  # a tenth of the fair share is 0.05
        told = [alarm.update([1 - rate, rate]) for rate in (0, 0, 0, 0.3, 0, 0.3, 0, 0)]
        assert told == [[], [1], [], [], [], [], [], [1]]

    def test_the_border(self):
        alarm = DeadMembers(2, 1, patience=1)
        assert alarm.update([0.95, 0.05]) == []  # a tenth is not under a tenth
        assert alarm.update([0.951, 0.049]) == [1]

    def test_overlap_raises_the_fair_share(self):
        rates = [1.0, 0.93, 0.07, 0.0]
        assert DeadMembers(4, 1, patience=1).update(rates) == [3]
        assert DeadMembers(4, 3, patience=1).update(rates) == [2, 3]  # 0.075

    def test_all_win_all(self):
        alarm = DeadMembers(3, 3)  # an independent ensemble
        assert not any(alarm.update([1.0] * 3) for _ in range(5))

    @pytest.mark.parametrize("stop", range(6))
    def test_goes_on_where_it_was(self, stop):
        history = [[0.98, 0.02], [0.99, 0.01], [1, 0], [0.5, 0.5], [0, 1], [0, 1]]
        straight, first, second = (DeadMembers(2, 1, 2) for _ in range(3))
        expected = [straight.update(rates) for rates in history]
        told = [first.update(rates) for rates in history[:stop]]
        second.restore(json.loads(json.dumps(first.state())))
        assert told + [second.update(rates) for rates in history[stop:]] == expected

    def test_the_state_is_a_copy(self):
        alarm = DeadMembers(2, 1)
        state = alarm.state()
        alarm.update([1, 0])
        assert state == {"epochs_below": [0, 0]}

    def test_wrong_numbers_of_members(self):
        with pytest.raises(ValueError, match="win_rates must have one entry a member, 3. Got 2"):
            DeadMembers(3, 1).update([0.5, 0.5])
        with pytest.raises(ValueError, match="state must be of 3 members. Got 2"):
            DeadMembers(3, 1).restore(DeadMembers(2, 1).state())

    def test_the_warning_says_what_to_try(self):
        alarm = DeadMembers(5, 2)
        text = alarm.warning([1, 3])
        assert text.startswith(
            "Members 1, 3 won under a tenth of the fair share (40% of the examples) for 3 epochs"
        )
        for cure in ("larger overlap", "smaller beta", "warm start"):
            assert cure in text
        assert alarm.warning([4]).startswith("Member 4 won")


class Terminal(io.StringIO):
    """A stderr that says it is a terminal."""

    def isatty(self):
        return True

    def text(self):
        """What was written, without the codes for colours and cursor."""
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.getvalue()).replace("\r", "\n")


@pytest.fixture
def use_terminal(monkeypatch):
    """A function, because pytest puts its own stderr in place between a fixture and its test."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")

    def use():
        monkeypatch.setattr(sys, "stderr", Terminal())
        return sys.stderr

    return use


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(seconds=1000.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: now.seconds)
    return now


class TestProgressPiped:
    def test_one_plain_line_an_epoch(self, capsys):
        with Progress(20, title="CMCL [new]") as progress:
            progress.advance(0.5, loss=2.0)
            progress.epoch(ROW)
            progress.epoch(
                {"epoch": 4, "seed": 7, "loss": 1.0, "lr": 0.005, "images_per_second": 7.0, "top1": None}
            )
            progress.note("[bold] is not markup here" + " and long lines stay whole" * 9)
        out, err = capsys.readouterr()
        assert out == ""
        assert err.splitlines() == [
            "CMCL [new] epoch 3/20 loss 1.2346, top-1 10.18 %, oracle 3.83 %, lr 0.05, 51,234 images/s",
            "CMCL [new] epoch 4/20 seed 7, loss 1.0000, lr 0.005, 7 images/s",
            "[bold] is not markup here" + " and long lines stay whole" * 9,
        ]

    def test_colours_forced_or_a_dumb_terminal_make_no_bar(self, capsys, use_terminal, monkeypatch):
        terminal = use_terminal()
        monkeypatch.setenv("TERM", "dumb")
        with Progress(20) as progress:
            progress.epoch(ROW)
        assert terminal.getvalue().count("\n") == 1
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setattr(sys, "stderr", io.StringIO())
        with Progress(20) as progress:
            progress.epoch(ROW)
        assert sys.stderr.getvalue().count("\n") == 1

    def test_the_last_epoch_may_be_a_part(self, capsys):
        Progress(2.5).epoch({"epoch": 2.5, "loss": 1.0})
        assert capsys.readouterr().err == "epoch 2.5/2.5 loss 1.0000\n"


def test_quiet_shows_nothing(capsys, use_terminal):
    terminal = use_terminal()
    with Progress(20, quiet=True) as progress:
        progress.advance(0.5, loss=2.0)
        progress.epoch(ROW)
        progress.note("hello")
    assert terminal.getvalue() == ""
    assert capsys.readouterr().out == ""


class TestProgressOnATerminal:
    def test_the_bar(self, use_terminal, clock, capsys):
        terminal = use_terminal()
        with Progress(20, title="CMCL") as progress:
            assert "CMCL epoch 1/20" in terminal.text()
            progress.advance(2.0)  # resumed: the first two took no time here
            clock.seconds += 30
            progress.advance(2.5, loss=1.5)
            assert "epoch 3/20" in terminal.text()
            assert "0:17:30 left loss 1.5000" in terminal.text()
            clock.seconds += 30
            progress.epoch(ROW)
        last = terminal.text().rstrip("\n").splitlines()[-1]
        for part in ("epoch 4/20", "0:17:00 left", "loss 1.2346, top-1 10.18 %, oracle 3.83 %, lr 0.05"):
            assert part in last
        assert capsys.readouterr().out == ""

    def test_drawn_at_most_a_few_times_a_second(self, use_terminal, clock):
        terminal = use_terminal()
        with Progress(20) as progress:
            for step in range(1000):  # in one second
                clock.seconds += 0.001
                progress.advance(step / 1000, loss=1.0)
            assert 3 <= terminal.text().count("loss") <= 5
            progress.epoch({"epoch": 1, "loss": 9.0})  # always shown
            assert "loss 9.0000" in terminal.text()

    def test_the_end(self, use_terminal, clock):
        terminal = use_terminal()
        with Progress(2) as progress:
            progress.advance(0.0)
            clock.seconds += 1
            progress.epoch({"epoch": 2, "loss": 1.0})
        last = terminal.text().rstrip("\n").splitlines()[-1]
        assert "epoch 2/2" in last
        assert "0:00:00 left" in last

    def test_notes_come_above_the_bar(self, use_terminal):
        terminal = use_terminal()
        with Progress(20, title="CMCL") as progress:
            progress.note("a [note]")
        lines = [line for line in terminal.text().splitlines() if line.strip()]
        assert any(line.startswith("a [note]") for line in lines)
        assert lines[-1].startswith("CMCL")

    def test_results_on_stdout_stay_there(self, use_terminal, capsys):
        terminal = use_terminal()
        with Progress(20):
            sys.stdout.write("result\n")
        assert capsys.readouterr().out == "result\n"
        assert "result" not in terminal.text()

    def test_the_bar_ends_with_an_error(self, use_terminal):
        terminal = use_terminal()
        with pytest.raises(ZeroDivisionError), Progress(20):
            raise ZeroDivisionError
        assert terminal.getvalue().endswith("\x1b[?25h")  # the cursor is back

    @pytest.mark.parametrize("columns", [60, 80, 200])
    def test_any_width_shows_all_of_it(self, use_terminal, clock, monkeypatch, columns):
        terminal = use_terminal()
        monkeypatch.setenv("COLUMNS", str(columns))
        with Progress(200, title="CMCL") as progress:
            progress.advance(0.0)
            clock.seconds += 30
            progress.epoch(ROW)
        lines = terminal.text().splitlines()
        assert max(map(len, lines)) <= columns
        shown = " ".join(" ".join(lines).split())
        for part in ("epoch 4/200", "left", "1.2346,", "10.18 %,", "3.83 %,", "0.05,", "51,234"):
            assert part in shown
