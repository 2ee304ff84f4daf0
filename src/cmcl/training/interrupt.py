"""Signals that ask a run to stop."""

import signal
import threading
from types import FrameType
from typing import Any, Self


class Interrupt:
    """While active, SIGINT and SIGTERM only ask to stop, so that the loop can end its step and save.

    A second SIGINT raises KeyboardInterrupt at once. Signals reach the main thread alone: in any other
    this does nothing. A signal to a whole group of processes ends a DataLoader's workers, too; torch would
    tell of that by an exception wherever the loop is, so from then on it is not told.
    """

    def __init__(self) -> None:
        self.asked = False
        self.name = ""
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not None:  # None: not Python's, so not to be put back
                    self._previous[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *error: object) -> None:
        while self._previous:
            signal.signal(*self._previous.popitem())

    def _ask(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.name == name == "SIGINT":
            raise KeyboardInterrupt
        self.asked, self.name = True, name
        self._ignore_dying_children()

    def _ignore_dying_children(self) -> None:
        if not hasattr(signal, "SIGCHLD") or threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGCHLD) is not None and signal.SIGCHLD not in self._previous:
            self._previous[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
