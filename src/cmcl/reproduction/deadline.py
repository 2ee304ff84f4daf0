"""A run that ends in time: it is asked to stop as by a SIGTERM, saves itself, and can be resumed."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ..training import Interrupted
from ..training.interrupt import Interrupt

TIME_OVER = "time over"


@contextmanager
def stopping_after(seconds: float | None) -> Iterator[None]:
    """Ask whatever trains in this block to stop once the time is over, and say so. None: never."""
    done, asked = threading.Event(), threading.Event()

    def ask() -> None:
        wait = seconds
        while not done.wait(wait):
            handler = signal.getsignal(signal.SIGTERM)
            # Only while the engine listens: at any other moment the signal would end the process.
            if callable(handler) and isinstance(getattr(handler, "__self__", None), Interrupt):
                handler(signal.SIGTERM, None)
                asked.set()
            wait = 0.1  # again, for what starts to train after the time is over

    if seconds is None:
        yield
        return
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    try:
        yield
    except Interrupted as stop:
        if not asked.is_set():
            raise
        raise Interrupted(str(stop).replace("stopped by SIGTERM", TIME_OVER)) from None
    finally:
        done.set()
        thread.join()  # or it might ask the next run
