"""One worker as the pool sees it: one attempt at a time, and how an attempt can end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from infra.contracts.records import GenerateReply, GenerateRequest
from infra.inference.capabilities import Capabilities


class AttemptError(Exception):
    """An attempt without an answer; another one, here or elsewhere, may have one."""


class Unreachable(AttemptError):
    """No usable answer from the other side; retried until the deadline."""


class Busy(AttemptError):
    """429 or 503: retried until the deadline. The worker lives, so its health is not in doubt."""

    def __init__(self, message: str, retry_after_secs: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_secs = retry_after_secs


class Failed(AttemptError):
    """Answered, but not usably; retried a few times."""


class Call:
    """One attempt under way. Whoever does not want its answer any more cancels it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stop: Callable[[], None] | None = None
        self.cancelled = False

    def on_cancel(self, stop: Callable[[], None]) -> None:
        """Have ``stop`` called when cancelled. Raises ``Unreachable`` if that is past."""
        with self._lock:
            if self.cancelled:
                raise Unreachable("cancelled")
            self._stop = stop

    def off(self) -> None:
        """Nothing is left to stop."""
        with self._lock:
            self._stop = None

    def cancel(self) -> None:
        """End the attempt: its connection is cut, which is how a server hears of it."""
        with self._lock:
            self.cancelled = True
            if self._stop is not None:
                self._stop()


class Worker(Protocol):
    """A place that generates. Safe from several threads."""

    name: str
    """For messages and metrics, e.g. ``worker 10.0.0.3:8000``."""
    capabilities: Capabilities

    def attempt(self, request: GenerateRequest, call: Call) -> GenerateReply:
        """Ask once, for at most ``request.timeout_secs``.

        Raises:
            AttemptError: no usable answer.
            InferenceError: refused, not retryable.
        """

    def probe(self, timeout_secs: float) -> None:
        """Return if the worker is well. Raises ``Unreachable``."""

    def close(self) -> None:
        """Cut all connections."""
