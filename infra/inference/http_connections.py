"""Kept-alive connections to one address, lent to one request at a time."""

from __future__ import annotations

import contextlib
import http.client
import select
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass

from infra.inference.worker import Call, Unreachable

MAX_REPLY_BYTES = 1 << 30
MAX_RETRY_AFTER_SECS = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpAnswer:
    """Status, body and how long the other side wants to be left alone."""

    status: int
    body: bytes
    retry_after_secs: float = 0.0


class HttpConnections:
    """Safe from several threads.

    Args:
        host: The other side.
        port: The other side.
        secure: TLS.
        headers: Sent with every request.
        patience_secs: After so long without the first byte of an answer, ``alive`` is asked.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        secure: bool = False,
        headers: dict[str, str] | None = None,
        patience_secs: float = 10.0,
    ) -> None:
        self._host, self._port, self._secure = host, port, secure
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        self._patience_secs = patience_secs
        self._free: list[http.client.HTTPConnection] = []
        self._lent: set[http.client.HTTPConnection] = set()
        self._closed = False
        self._lock = threading.Lock()

    def get(self, path: str, timeout_secs: float) -> HttpAnswer:
        """Ask on a connection of its own. Raises ``Unreachable``."""
        connection = self._new()
        connection.timeout = timeout_secs
        with contextlib.closing(connection):
            try:
                connection.request("GET", path, headers=self._headers)
                return _read(connection)
            except (OSError, http.client.HTTPException) as e:
                raise Unreachable(f"{type(e).__name__}: {e}") from e

    def post(
        self, path: str, data: bytes, timeout_secs: float, call: Call, alive: Callable[[], None]
    ) -> HttpAnswer:
        """Send once; a kept connection that the server has closed meanwhile is replaced at once.

        Raises:
            Unreachable: no answer, cancelled, or ``alive`` raised it while we waited.
        """
        while True:
            connection, fresh = self._lend()
            try:
                connection.timeout = timeout_secs
                if fresh:
                    connection.connect()
                call.on_cancel(lambda c=connection: _cut(c))
                if self._closed:
                    raise Unreachable("the client was closed")
                connection.sock.settimeout(timeout_secs)
                connection.request("POST", path, data, self._headers)
                self._wait_for_answer(connection, timeout_secs, alive)
                answer = _read(connection)
            except (OSError, http.client.HTTPException) as e:
                self._drop(connection, call)
                if fresh or call.cancelled or isinstance(e, TimeoutError):
                    raise Unreachable(f"{type(e).__name__}: {e}") from e
            except Unreachable:
                self._drop(connection, call)
                raise
            else:
                call.off()
                self._give_back(connection)
                return answer

    def close(self) -> None:
        """Cut everything: a reader that is blocked wakes up with an error."""
        with self._lock:
            self._closed = True
            free, lent = list(self._free), list(self._lent)
            self._free.clear()
        for connection in free:
            connection.close()
        for connection in lent:
            _cut(connection)

    def _wait_for_answer(
        self, connection: http.client.HTTPConnection, secs: float, alive: Callable[[], None]
    ) -> None:
        """Generation is silent for long; so is a machine that is gone. ``alive`` tells them."""
        poll = select.poll()
        poll.register(connection.sock, select.POLLIN)
        while secs > self._patience_secs:
            if poll.poll(1000 * self._patience_secs):
                return
            secs -= self._patience_secs
            alive()
        connection.sock.settimeout(secs)

    def _new(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        return kind(self._host, self._port)

    def _lend(self) -> tuple[http.client.HTTPConnection, bool]:
        with self._lock:
            if self._closed:
                raise Unreachable("the client was closed")
            fresh = not self._free
            connection = self._new() if fresh else self._free.pop()
            self._lent.add(connection)
        return connection, fresh

    def _give_back(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            self._lent.discard(connection)
            if connection.sock is not None and not self._closed:
                self._free.append(connection)

    def _drop(self, connection: http.client.HTTPConnection, call: Call) -> None:
        call.off()
        with self._lock:
            self._lent.discard(connection)
        connection.close()


def _read(connection: http.client.HTTPConnection) -> HttpAnswer:
    response = connection.getresponse()
    body = response.read(MAX_REPLY_BYTES)
    try:
        wait = float(response.headers.get("Retry-After", "0"))
    except ValueError:  # a date; our own backoff does
        wait = 0.0
    wait = min(max(wait, 0.0), MAX_RETRY_AFTER_SECS) if wait == wait else 0.0
    return HttpAnswer(status=response.status, body=body, retry_after_secs=wait)


def _cut(connection: http.client.HTTPConnection) -> None:
    """From any thread: a reader that is blocked in the socket wakes up with an error."""
    sock = connection.sock
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
