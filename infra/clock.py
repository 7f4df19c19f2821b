"""The clock, handed in wherever time is read or waited for, so that tests need no sleep."""

from __future__ import annotations

import threading
import time
from typing import Protocol


class Clock(Protocol):
    """Wall-clock seconds (Unix time) and waiting."""

    def now(self) -> float:
        """Seconds since 1970, UTC."""

    def wait(self, secs: float) -> None:
        """Return after ``secs``; at once if they are not positive."""


class SystemClock:
    """The machine's clock."""

    def now(self) -> float:
        return time.time()

    def wait(self, secs: float) -> None:
        if secs > 0:
            time.sleep(secs)


class ManualClock:
    """A clock that only its owner moves: ``wait`` advances it and returns at once."""

    def __init__(self, start: float = 1_000_000.0) -> None:
        self._now = start
        self._lock = threading.Lock()

    def now(self) -> float:
        with self._lock:
            return self._now

    def wait(self, secs: float) -> None:
        self.advance(max(secs, 0.0))

    def advance(self, secs: float) -> None:
        """Move forward. Raises ``ValueError`` if ``secs`` is negative."""
        if secs < 0:
            raise ValueError(f"secs = {secs}; time does not go back")
        with self._lock:
            self._now += secs
