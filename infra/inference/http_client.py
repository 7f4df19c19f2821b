"""An inference worker over HTTP: ``POST /generate`` with a request record, a reply record back.

A thread pool of blocking calls over kept-alive connections. What may succeed later is retried with
backoff and jitter until the request's own deadline: connection errors (the worker may come back on
its port) and 503. A 4xx is never retried; other failures at most ``retries`` times. Repeats carry
the same request id, so the worker joins them with what it is already running.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import random
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from urllib.parse import urlsplit

from infra.clock import Clock, SystemClock
from infra.contracts.errors import ConfigError, InferenceError, SchemaMismatch
from infra.contracts.json_codec import from_json, to_json
from infra.contracts.records import GenerateReply, GenerateRequest

FIRST_WAIT_SECS, LONGEST_WAIT_SECS = 0.05, 2.0
GRACE_SECS = 2.0
"""Left for the worker's own timeout error to arrive, which says more than a closed socket."""
MAX_REPLY_BYTES = 1 << 30


class _Unreachable(Exception):
    """No usable answer from the other side; retried until the deadline."""


class _Busy(Exception):
    """503: retried until the deadline."""


class _Failed(Exception):
    """Answered, but not usably; retried a few times."""


class HttpInferenceClient:
    """Client of one worker; safe from several threads.

    Args:
        url: ``http://host:port``.
        threads: Requests under way at a time; further ones queue.
        retries: Attempts after the first for errors that are neither the caller's (4xx) nor of the
            connection.
        clock: For deadlines and backoff.
        jitter: Randomness of the backoff.
    """

    def __init__(
        self,
        url: str,
        *,
        threads: int = 32,
        retries: int = 4,
        clock: Clock | None = None,
        jitter: random.Random | None = None,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or not parts.port:
            raise ConfigError(f"endpoint '{url}': give http://host:port")
        self._host, self._port = parts.hostname, parts.port
        self._retries = retries
        self._clock = clock or SystemClock()
        self._jitter = jitter or random.Random()
        self._closing = threading.Event()
        self._local = threading.local()
        self._connections: set[http.client.HTTPConnection] = set()
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="inference")

    def submit(self, request: GenerateRequest) -> Future[GenerateReply]:
        """Start one request; its deadline, retries included, starts now."""
        if self._closing.is_set():
            raise InferenceError("the client is closed", retryable=False)
        return self._pool.submit(self._generate, request, self._clock.now() + request.timeout_secs)

    def health(self, timeout_secs: float = 5.0) -> dict[str, object]:
        """Ask ``GET /healthz`` once. Raises ``InferenceError`` when there is no good answer."""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout_secs)
        with contextlib.closing(connection):
            try:
                connection.request("GET", "/healthz")
                response = connection.getresponse()
                body = json.loads(response.read())
            except (OSError, http.client.HTTPException, ValueError) as e:
                raise InferenceError(f"{self._name}: {type(e).__name__}: {e}") from e
        if response.status != 200:
            raise InferenceError(f"{self._name}: not healthy: {body}")
        return body

    def close(self) -> None:
        """Stop accepting work; requests under way end with an error."""
        self._closing.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            for connection in self._connections:
                _shut(connection)

    @property
    def _name(self) -> str:
        return f"worker {self._host}:{self._port}"

    def _generate(self, request: GenerateRequest, deadline: float) -> GenerateReply:
        failures, wait = 0, FIRST_WAIT_SECS
        while True:
            left = deadline - self._clock.now()
            try:
                if left <= 0:
                    raise _Unreachable("the deadline passed before it was sent")
                return self._attempt(dataclasses.replace(request, timeout_secs=left))
            except (_Unreachable, _Busy, _Failed) as e:
                failures += isinstance(e, _Failed)
                left = deadline - self._clock.now()
                if self._closing.is_set():
                    raise InferenceError(f"{self._name}: the client was closed") from e
                if left <= wait or failures > self._retries:
                    raise InferenceError(
                        f"{self._name}: gave up after {request.timeout_secs - left:.1f} of "
                        f"{request.timeout_secs:g} s: {e.__cause__ or e}"
                    ) from e
                self._clock.wait(wait * self._jitter.uniform(0.5, 1.0))
                wait = min(2 * wait, LONGEST_WAIT_SECS)

    def _attempt(self, request: GenerateRequest) -> GenerateReply:
        status, body = self._post(to_json(request), request.timeout_secs + GRACE_SECS)
        if status == 200:
            try:
                reply = from_json(GenerateReply, body)
            except SchemaMismatch as e:
                raise _Failed("the reply cannot be read") from e
            if reply.request_id != request.request_id:
                raise _Failed(f"a reply to another request, {reply.request_id}")
            return reply
        text = _error_text(body)
        if status == 503:
            raise _Busy(f"status 503: {text}")
        if 400 <= status < 500:
            raise InferenceError(f"{self._name}: refused ({status}): {text}", retryable=False)
        raise _Failed(f"status {status}: {text}")

    def _post(self, data: bytes, timeout_secs: float) -> tuple[int, bytes]:
        """Send once; a kept connection that the server has closed meanwhile is replaced at once."""
        for kept in (True, False):
            connection = self._connection(kept)
            fresh = connection.sock is None
            connection.timeout = timeout_secs
            try:
                if fresh:
                    connection.connect()
                connection.sock.settimeout(timeout_secs)
                connection.request("POST", "/generate", data, {"Content-Type": "application/json"})
                response = connection.getresponse()
                body = response.read(MAX_REPLY_BYTES)
                return response.status, body
            except (OSError, http.client.HTTPException) as e:
                _shut(connection)
                if fresh or isinstance(e, TimeoutError):
                    raise _Unreachable(f"{type(e).__name__}: {e}") from e
        raise AssertionError("a fresh connection returns or raises")

    def _connection(self, kept: bool) -> http.client.HTTPConnection:
        connection = getattr(self._local, "connection", None)
        if connection is None or not kept:
            with self._lock:
                self._connections.discard(connection)
                connection = http.client.HTTPConnection(self._host, self._port)
                self._connections.add(connection)
            self._local.connection = connection
        return connection


def _shut(connection: http.client.HTTPConnection) -> None:
    """Close from any thread: a reader that is blocked in the socket wakes up with an error."""
    sock = connection.sock
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.shutdown(2)
    connection.close()


def _error_text(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"])[:500]
    except (ValueError, KeyError, TypeError):
        return repr(body[:200])
