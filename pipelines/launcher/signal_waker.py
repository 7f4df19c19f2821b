"""Waiting that a signal ends: a child's death, Ctrl-C, SIGTERM, a closed terminal."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class SignalWaker:
    """Counts requests to stop, and wakes ``wait`` for them and for children that end.

    Use as a context manager, in the main thread. The earlier handlers come back on exit.
    """

    def __init__(self) -> None:
        self.stops = 0
        """How often someone asked to stop."""
        self.last_stop = signal.SIGINT

    def __enter__(self) -> SignalWaker:
        self._read, self._write = os.pipe()
        for end in (self._read, self._write):
            os.set_blocking(end, False)
        self._old_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._old = {s: signal.signal(s, self._stop) for s in STOP_SIGNALS}
        self._old[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_fd)
        os.close(self._read)
        os.close(self._write)

    def wait(self, secs: float) -> None:
        """Return after ``secs``, or as soon as a signal arrives (also one that came before)."""
        select.select([self._read], [], [], max(secs, 0.0))
        with contextlib.suppress(BlockingIOError):
            while os.read(self._read, 4096):
                pass

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.stops += 1
        self.last_stop = signal.Signals(number)
