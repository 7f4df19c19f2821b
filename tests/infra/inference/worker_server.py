"""A small real HTTP server that speaks the worker's protocol, answering as the fake client does."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from infra.contracts.errors import InferenceError
from infra.contracts.json_codec import from_json, to_json
from infra.contracts.records import GenerateRequest
from infra.inference.fake_client import FakeInferenceClient

Script = Callable[[int], "tuple[int, bytes] | tuple[int, bytes, dict[str, str]] | None"]
"""Number of the call (0, 1, ...) -> what to answer instead (status, body, headers), or None for the
real answer. It may wait for ``WorkerServer.closing``: a worker that hangs."""


class WorkerServer:
    """Started on construction. ``script`` may answer with status 0: close without an answer."""

    def __init__(self, fake: FakeInferenceClient, script: Script = lambda n: None, port: int = 0):
        self.fake, self.script = fake, script
        self.calls, self.connections = 0, 0
        self.timeouts: list[float] = []
        self.lock = threading.Lock()
        self.open: set = set()
        self.closing = threading.Event()
        self.sick = threading.Event()
        """While set, ``/healthz`` has no answer either."""
        self.probes = threading.Semaphore(0)
        """One for each ``/healthz``."""
        self.server = ThreadingHTTPServer(("127.0.0.1", port), self._handler())
        self.server.daemon_threads = True
        self.server.handle_error = lambda *_: None  # clients that cut a connection are expected
        self.port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    def close(self) -> None:
        """Stop listening and cut every connection, as a killed worker would."""
        self.closing.set()
        self.server.shutdown()
        self.server.server_close()
        for connection in list(self.open):
            with contextlib.suppress(OSError):  # the other side was faster
                connection.shutdown(2)
        self.thread.join()

    def respond(self, page: str, body: bytes) -> tuple:
        with self.lock:
            number, self.calls = self.calls, self.calls + 1
        scripted = self.script(number)
        return scripted or self.answer(page, body)

    def answer(self, page: str, body: bytes) -> tuple[int, bytes]:
        request = from_json(GenerateRequest, body)
        self.timeouts.append(request.timeout_secs)
        try:
            return 200, to_json(self.fake.answer(request))
        except InferenceError as e:
            return 400, json.dumps({"error": str(e), "retryable": e.retryable}).encode()

    def _handler(worker) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def setup(self):
                super().setup()
                worker.connections += 1
                worker.open.add(self.connection)

            def finish(self):
                worker.open.discard(self.connection)
                super().finish()

            def do_POST(self):
                length = int(self.headers["Content-Length"])
                self._send(*worker.respond(self.path, self.rfile.read(length)))

            def do_GET(self):
                worker.probes.release()
                if worker.sick.is_set():
                    self.close_connection = True
                    return
                body = {"status": "ok", "version": worker.fake.version, "slots": 1}
                self._send(200, json.dumps(body | {"busy": 0, "queued": 0}).encode())

            def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None):
                if status == 0:
                    self.close_connection = True
                    return
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                for name, value in (headers or {}).items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args):
                """Quiet."""

        return Handler
