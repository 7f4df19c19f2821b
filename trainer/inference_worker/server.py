"""The worker over HTTP: Headrace's own pages and OpenAI's.

    POST /generate, /v1/generate                  records as JSON (``infra.contracts.json_codec``)
    POST /v1/completions, /v1/chat/completions    OpenAI's, streamed or whole
    POST /v1/pause, /v1/resume, /v1/abort, /v1/drain    for who is on call
    GET  /healthz, /health, /metrics, /v1/models

Anything wrong with a request is a 4xx with the reason; a full queue is a 429, a stopping, crowded
or late worker a 503, both with Retry-After. See ``docs/worker.md``.
"""

from __future__ import annotations

import contextlib
import errno
import random
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from typing import Any

from infra.clock import Clock, SystemClock
from infra.contracts.errors import ConfigError
from trainer.inference_worker.http.http_backend import Backend
from trainer.inference_worker.http.http_handler import Handler
from trainer.inference_worker.http.http_limits import HttpLimits, Refused
from trainer.inference_worker.server_metrics import ServerMetrics


class WorkerServer(ThreadingHTTPServer):
    """One thread per connection; connections are kept alive."""

    daemon_threads = True
    request_queue_size = 1024
    """Connections that wait for the accepting thread, callers that have left among them."""

    def __init__(
        self,
        host: str,
        port: int,
        backend: Backend | None,
        *,
        limits: HttpLimits | None = None,
        token: str = "",
        clock: Clock | None = None,
        entropy: random.Random | None = None,
    ) -> None:
        """Bind.

        Args:
            host: address to listen on.
            port: 0 takes any free one.
            backend: the worker; one that does not exist yet is set before ``serve_forever``.
            limits: how much is taken on.
            token: callers must show it, if it is not empty.
            clock: for latencies.
            entropy: makes request ids, and seeds where a caller names none.

        Raises:
            ConfigError: the port is taken.
        """
        self.backend, self.token = backend, token
        self.limits = limits or HttpLimits()
        self.clock = clock or SystemClock()
        self.entropy = entropy or random.SystemRandom()
        self.created = int(self.clock.now())
        self.draining = False
        self.connections = 0
        self._metrics = ServerMetrics()
        self._had_weights = False
        self._running = 0
        self._changed = threading.Condition()
        try:
            super().__init__((host, port), Handler)
        except OSError as e:
            if e.errno not in (errno.EADDRINUSE, errno.EACCES, errno.EADDRNOTAVAIL):
                raise
            raise ConfigError(
                f"cannot listen on {host}:{port}: {e.strerror}; give another --port (0: any free)"
            ) from e

    def drain(self) -> None:
        """Turn new requests away from now on; those under way go on, or are cut if they can be."""
        self.draining = True
        self.backend.scheduler.cut_segments()

    def stop_serving(self) -> None:
        """End the process as SIGTERM does, once."""
        if not self.draining:
            self.drain()
            self.backend.drain()

    def health(self) -> dict[str, Any]:
        """The backend's, while nothing is stopping."""
        health = self.backend.health()
        return health | {"status": "draining"} if self.draining else health

    def wait_idle(self, secs: float) -> bool:
        """Wait until no request is under way, at most ``secs``; whether none is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._running, secs)

    def check_open(self) -> None:
        """Raises ``Refused`` (503) while draining, or long without a first version."""
        if self.draining:
            raise Refused(503, "the worker is stopping; ask another one", retryable=True)
        if not self._had_weights:
            self._had_weights = self.backend.health()["version"] >= 0
            waited = self.clock.now() - self.created
            if not self._had_weights and waited > self.limits.no_weights_secs:
                text = f"no weights for {waited:.0f} s; is the trainer publishing?"
                raise Refused(503, text, retryable=True)

    @contextlib.contextmanager
    def answering(self, page: str) -> Iterator[Callable[[int], None]]:
        """Count one request as running; the function given takes its status at the end."""
        started = self.clock.now()
        with self._changed:
            self._running += 1
        try:
            yield lambda status: self._metrics.observe(page, status, self.clock.now() - started)
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def metrics_text(self) -> str:
        """The page ``/metrics``."""
        return self._metrics.render(self.health(), self.backend.scheduler.totals, self.connections)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Give the connection a thread; far beyond the limit not even one to refuse it."""
        with self._changed:
            crowded = self.connections >= 2 * self.limits.connections
            self.connections += not crowded
        if crowded:
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._left()
            raise

    def process_request_thread(self, request: socket.socket, client_address: Any) -> None:
        """The connection's thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._left()

    def _left(self) -> None:
        with self._changed:
            self.connections -= 1

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is its own business; anything else prints its traceback."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)
