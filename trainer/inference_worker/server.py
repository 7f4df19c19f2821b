"""The worker over HTTP: ``POST /generate`` and ``GET /healthz``.

Bodies are records as JSON (``infra.contracts.json_codec``). Anything wrong with a request is a 4xx
with ``{"error": ..., "retryable": false}``; a full, stopping or late worker is a 503, retryable.
"""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Callable
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from infra.contracts.errors import ConfigError, InferenceError, SchemaMismatch
from infra.contracts.json_codec import from_json, to_json
from infra.contracts.records import GenerateReply, GenerateRequest

MAX_BODY_BYTES = 8 << 20
MAX_SAMPLES = 4096
MAX_TIMEOUT_SECS = 24 * 3600.0
IDLE_SECS = 120.0
"""A connection that sends nothing for so long is closed."""
GRACE_SECS = 5.0
"""How much longer than its deadline a request is waited for: the engine reports lateness itself."""

Submit = Callable[[GenerateRequest], "Future[GenerateReply]"]
Health = Callable[[], dict[str, Any]]


class WorkerServer(ThreadingHTTPServer):
    """One thread per connection; connections are kept alive."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, host: str, port: int, submit: Submit, health: Health) -> None:
        """Bind. Raises ``ConfigError`` if the port is taken."""
        self.submit = submit
        self.health = health
        try:
            super().__init__((host, port), _Handler)
        except OSError as e:
            if e.errno not in (errno.EADDRINUSE, errno.EACCES, errno.EADDRNOTAVAIL):
                raise
            raise ConfigError(
                f"cannot listen on {host}:{port}: {e.strerror}; give another --port (0: any free)"
            ) from e

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is its own business; anything else prints its traceback."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Refused(Exception):
    """A request that gets an error status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    server: WorkerServer
    protocol_version = "HTTP/1.1"
    timeout = IDLE_SECS
    # One write per answer and no Nagle: else each reply on a kept connection waits 40 ms.
    wbufsize = -1
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        if self.path != "/healthz":
            self._error(404, f"no page {self.path[:100]}; GET /healthz or POST /generate")
            return
        self._send(200, json.dumps(self.server.health()).encode())

    def do_POST(self) -> None:
        try:
            body = self._body()
            if self.path != "/generate":
                raise _Refused(404, f"no page {self.path[:100]}; POST /generate")
            self._send(200, to_json(self._generate(_parse(body))))
        except _Refused as e:
            self._error(e.status, str(e))
        except InferenceError as e:
            self._error(503 if e.retryable else 422, str(e), retryable=e.retryable)

    def _generate(self, request: GenerateRequest) -> GenerateReply:
        future = self.server.submit(request)
        try:
            return future.result(request.timeout_secs + GRACE_SECS)
        except TimeoutError as e:
            raise InferenceError(f"no answer within {request.timeout_secs:g} s") from e

    def _body(self) -> bytes:
        """Read the body; a body that is not read ends the connection, as it would be next."""
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()):
            self.close_connection = True
            raise _Refused(411, "Content-Length is missing or not a number")
        if int(length) > MAX_BODY_BYTES:
            self.close_connection = True
            raise _Refused(413, f"body of {length} bytes; at most {MAX_BODY_BYTES}")
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            self.close_connection = True
            raise _Refused(400, f"body ends after {len(body)} of {length} bytes")
        return body

    def _error(self, status: int, message: str, *, retryable: bool = False) -> None:
        self._send(status, json.dumps({"error": message, "retryable": retryable}).encode())

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Called by the base class for what is no HTTP; the same form as our own errors."""
        self.request_version = self.protocol_version  # else rubbish gets an answer without status
        self.close_connection = True
        self._error(code, message or "not a request this server knows")

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing per request; metrics count them."""


def _parse(body: bytes) -> GenerateRequest:
    """Decode and check what the record's own checks do not cover. Raises ``_Refused``."""
    try:
        request = from_json(GenerateRequest, body)
    except SchemaMismatch as e:
        raise _Refused(400, str(e)) from e
    sampling = request.sampling
    checks = (
        (0 < len(request.request_id) <= 200, "request_id must have 1 to 200 characters"),
        (sampling.n <= MAX_SAMPLES, f"n = {sampling.n}; at most {MAX_SAMPLES}"),
        (len(request.seeds) == sampling.n, f"{len(request.seeds)} seeds for n = {sampling.n}"),
        (all(0 <= s < 2**32 for s in request.seeds), "seeds must be in [0, 2^32)"),
        (sampling.top_k < 2**31, f"top_k = {sampling.top_k}; below 2^31"),
        (len(sampling.stop) <= 16, f"{len(sampling.stop)} stop strings; at most 16"),
        (all(len(s) <= 256 for s in sampling.stop), "a stop string is longer than 256 characters"),
        (0 < request.timeout_secs <= MAX_TIMEOUT_SECS, "timeout_secs must be in (0, 86400]"),
    )
    problems = [text for ok, text in checks if not ok]
    if problems:
        raise _Refused(400, "; ".join(problems))
    return request
