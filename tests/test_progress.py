"""Progress as a person sees it, on a terminal and in a file."""

import io
import re
import sys
from types import SimpleNamespace

import pytest

from cmcl.training import progress
from cmcl.training.progress import Progress

ROW = {"epoch": 3, "loss": 1.23456, "lr": 0.05, "images_per_second": 51234.5, "top1": 10.181, "oracle": 3.83}


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
        with Progress(20) as progress:
            progress.advance(0.5, loss=2.0)
            progress.log(ROW)
            progress.log(
                {"epoch": 4, "seed": 7, "loss": 1.0, "lr": 0.005, "images_per_second": 7.0, "top1": None}
            )
        out, err = capsys.readouterr()
        assert out == ""
        assert err.splitlines() == [
            "epoch 3/20 loss 1.2346, top-1 10.18 %, oracle 3.83 %, lr 0.05, 51,234 images/s",
            "epoch 4/20 seed 7, loss 1.0000, lr 0.005, 7 images/s",
        ]

    def test_colours_forced_or_a_dumb_terminal_make_no_bar(self, capsys, use_terminal, monkeypatch):
        terminal = use_terminal()
        monkeypatch.setenv("TERM", "dumb")
        with Progress(20) as progress:
            progress.log(ROW)
        assert terminal.getvalue().count("\n") == 1
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setattr(sys, "stderr", io.StringIO())
        with Progress(20) as progress:
            progress.log(ROW)
        assert sys.stderr.getvalue().count("\n") == 1


def test_quiet_shows_nothing(capsys, use_terminal):
    terminal = use_terminal()
    with Progress(20, quiet=True) as progress:
        progress.advance(0.5, loss=2.0)
        progress.log(ROW)
    assert terminal.getvalue() == ""
    assert capsys.readouterr().out == ""


class TestProgressOnATerminal:
    def test_the_bar(self, use_terminal, clock, capsys):
        terminal = use_terminal()
        with Progress(20) as progress:
            assert "epoch 1/20" in terminal.text()
            progress.advance(2.0)  # resumed: the first two took no time here
            clock.seconds += 30
            progress.advance(2.5, loss=1.5)
            assert "epoch 3/20" in terminal.text()
            assert "0:17:30 left loss 1.5000" in terminal.text()
            clock.seconds += 30
            progress.log(ROW)
        last = terminal.text().rstrip("\n").splitlines()[-1]
        for part in ("epoch 4/20", "0:17:00 left", "loss 1.2346, top-1 10.18 %, oracle 3.83 %, lr 0.05"):
            assert part in last
        assert capsys.readouterr().out == ""
        with Progress(2) as progress:
            progress.advance(0.0)
            clock.seconds += 1
            progress.log({"epoch": 2, "loss": 1.0})
        assert "0:00:00 left" in terminal.text()
        assert "epoch 3/2 " not in terminal.text()

    def test_drawn_at_most_a_few_times_a_second(self, use_terminal, clock):
        terminal = use_terminal()
        with Progress(20) as progress:
            for step in range(1000):  # in one second
                clock.seconds += 0.001
                progress.advance(step / 1000, loss=1.0)
            assert 3 <= terminal.text().count("loss") <= 5
            progress.log({"epoch": 1, "loss": 9.0})  # always shown
            assert "loss 9.0000" in terminal.text()

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

    @pytest.mark.parametrize(("columns", "shown"), [(60, 1), (80, 3), (100, 4), (200, 5)])
    def test_one_line_at_any_width_with_the_most_important_numbers(
        self, use_terminal, clock, monkeypatch, columns, shown
    ):
        terminal = use_terminal()
        monkeypatch.setenv("COLUMNS", str(columns))
        with Progress(200) as progress:
            progress.advance(0.0)
            clock.seconds += 30
            progress.log(ROW)
        lines = [line for line in terminal.text().splitlines() if line.strip()]
        assert {line[:6] for line in lines} == {"epoch "}, "no second line"
        assert max(map(len, lines)) <= columns
        numbers = ("loss 1.2346", "top-1 10.18 %", "oracle 3.83 %", "lr 0.05", "51,234 images/s")
        assert [number in lines[-1] for number in numbers] == [i < shown for i in range(5)]
        assert "left" in lines[-1]
