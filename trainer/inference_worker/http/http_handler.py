"""One connection: pages, bodies, answers and streams of events."""

from __future__ import annotations

import json
import math
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any

from infra.contracts.errors import InferenceError
from infra.contracts.json_codec import to_json
from trainer.inference_worker.http import control_pages, openai_api
from trainer.inference_worker.http.http_call import Call
from trainer.inference_worker.http.http_checks import parse_record
from trainer.inference_worker.http.http_limits import Refused, check_token, refusal
from trainer.inference_worker.http.openai_reply import Shape
from trainer.inference_worker.http.openai_request import parse_openai

if TYPE_CHECKING:
    from trainer.inference_worker.server import WorkerServer

CALLER_GONE = 499
"""Never sent: what the metrics say of a caller that left first."""
SURPLUS_SECS = 5.0
"""A connection beyond the limit is kept so long for its one refusal."""
DISCARD_BYTES = 1 << 16
NATIVE_PAGES = ("/v1/generate", *control_pages.PAGES)

Pages = Mapping[str, Callable[["Handler"], None]]


class Handler(BaseHTTPRequestHandler):
    """Lives as long as its connection, in a thread of its own."""

    server: WorkerServer
    protocol_version = "HTTP/1.1"
    # One write per answer and no Nagle: else each reply on a kept connection waits 40 ms.
    wbufsize = -1
    disable_nagle_algorithm = True

    def setup(self) -> None:
        limits = self.server.limits
        self._surplus = self.server.connections > limits.connections
        self.timeout = SURPLUS_SECS if self._surplus else limits.idle_secs
        self._again_at = 0.0
        super().setup()

    def do_GET(self) -> None:
        self._serve(_GET)

    def do_POST(self) -> None:
        self._serve(_POST)

    def _serve(self, pages: Pages) -> None:
        """Answer one request; whatever happens is an answer and a count."""
        page = self.path.partition("?")[0]
        known = page in pages
        self._openai = page.startswith("/v1/") and page not in NATIVE_PAGES
        self._status, self._streaming = CALLER_GONE, False
        self._unread = self._length()
        with self.server.answering(page if known else "other") as done:
            try:
                if not known:
                    have = ", ".join([*_GET, *_POST])
                    raise Refused(404, f"no {self.command} {page[:100]}; there are {have}")
                pages[page](self)
            except Refused as e:
                self._refuse(e)
            except InferenceError as e:
                self._refuse(refusal(e, wrong=400 if self._openai else 422))
            except (ConnectionError, TimeoutError):
                self._status, self.close_connection, self._unread = CALLER_GONE, True, 0
            except Exception as e:
                traceback.print_exc(file=sys.stderr)
                self._refuse(Refused(500, f"a fault of the server: {type(e).__name__}: {e}"))
            try:
                self.wfile.flush()  # a draining worker ends when nothing counts as running
            finally:
                done(self._status)
        self._discard()

    # --- pages ----------------------------------------------------------------------------------

    def _healthz(self) -> None:
        self._send(200, self.server.health())

    def _health(self) -> None:
        health = self.server.health()
        self._send(200 if health["status"] == "ok" else 503, health)

    def _metrics(self) -> None:
        self._send(200, self.server.metrics_text().encode(), "text/plain; version=0.0.4")

    def _models(self) -> None:
        self._check_token()
        self._send(200, openai_api.models(self.server.backend.model, self.server.created))

    def _generate(self) -> None:
        backend = self.server.backend
        request = parse_record(self._body(), backend.tokenizer.vocab_size)
        with Call(backend.scheduler, self.connection) as call:
            call.submit(request)
            self._send(200, to_json(call.replies()[0]))

    def _completions(self) -> None:
        self._complete(chat=False)

    def _chat(self) -> None:
        self._complete(chat=True)

    def _complete(self, *, chat: bool) -> None:
        server, backend = self.server, self.server.backend
        request = parse_openai(
            self._body(),
            chat=chat,
            vocab=backend.tokenizer.vocab_size,
            request_secs=server.limits.request_secs,
            entropy=server.entropy,
        )
        shape = Shape(
            request,
            token_text=backend.tokenizer.token_text,
            model=backend.model,
            created=int(server.clock.now()),
        )
        with Call(backend.scheduler, self.connection) as call:
            openai_api.submit(call, request, backend.model)
            if request.stream:
                self._stream(openai_api.stream(call, request, shape, backend))
            else:
                self._send(200, shape.answer(call.replies()))

    def _control(self) -> None:
        """For who is on call; also answered by a worker that is crowded or stopping."""
        self._check_token()
        body = self._read_body() if "Content-Length" in self.headers else b""
        done = control_pages.PAGES[self.path.partition("?")[0]](self.server, body)
        self._send(200, self.server.health() | done)

    # --- reading --------------------------------------------------------------------------------

    def _length(self) -> int:
        """The body's announced size; 0 for none and for what is no number."""
        length = self.headers.get("Content-Length", "0")
        return int(length) if length.isascii() and length.isdigit() and len(length) < 19 else 0

    def _check_token(self) -> None:
        if self.server.token:
            check_token(self.server.token, self.headers.get("Authorization", ""))

    def _body(self) -> bytes:
        """Read the body of a caller who may ask now."""
        self._check_token()
        if self._surplus:
            most = self.server.limits.connections
            self.close_connection = True
            raise Refused(503, f"more than {most} connections; try later", retryable=True)
        self.server.check_open()
        return self._read_body()

    def _read_body(self) -> bytes:
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()) or "Transfer-Encoding" in self.headers:
            self.close_connection = True
            raise Refused(411, "give a Content-Length, and no Transfer-Encoding")
        most = self.server.limits.body_bytes
        if len(length) > 18 or int(length) > most:
            self.close_connection = True
            raise Refused(413, f"body of {length[:20]} bytes; at most {most}")
        body = self.rfile.read(self._unread)
        if len(body) < self._unread:
            self.close_connection = True
            raise Refused(400, f"body ends after {len(body)} of {length} bytes")
        self._unread = 0
        return body

    def _discard(self) -> None:
        """Take in a body that was refused unread: closing on unread bytes could undo the answer."""
        left = min(self._unread, self.server.limits.body_bytes)
        while left > 0:
            data = self.rfile.read(min(left, DISCARD_BYTES))
            if not data:
                return
            left -= len(data)

    def handle_expect_100(self) -> bool:
        """Ask for the body, unless it is too long: then the answer is the refusal."""
        if self._length() <= self.server.limits.body_bytes:
            super().handle_expect_100()
            self.wfile.flush()
        return True

    # --- writing --------------------------------------------------------------------------------

    def _send(
        self,
        status: int,
        body: bytes | dict[str, Any],
        kind: str = "application/json",
        **headers: str,
    ) -> None:
        if isinstance(body, dict):
            body = json.dumps(body, allow_nan=False).encode()
        self._status = status
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, refused: Refused) -> None:
        body = refused.openai() if self._openai else refused.native()
        self._status = refused.status
        if self._streaming:  # the status is sent: the error is an event, and no end mark follows
            self.close_connection = True
            self._event(json.dumps(body))
            self._end_stream()
            return
        if self._unread:
            self.close_connection = True
        headers = {}
        if refused.status in (429, 503) and refused.retryable:
            headers["Retry_After"] = self._hold_who_is_early()
        if refused.status == 401:
            headers["WWW_Authenticate"] = "Bearer"
        self._send(refused.status, body, **headers)

    def _hold_who_is_early(self) -> str:
        """Keep who comes back before the time it was told until then; return the seconds to tell.

        Hundreds of callers that retry at once would else take the interpreter from the engine.
        """
        secs, clock = self.server.limits.retry_secs, self.server.clock
        clock.wait(min(self._again_at - clock.now(), secs))
        self._again_at = clock.now() + secs
        return str(math.ceil(secs))

    def _stream(self, events: Iterator[dict[str, Any]]) -> None:
        """Send events as they come. The first is waited for, so early errors have a status."""
        for event in events:
            if not self._streaming:
                self._begin_stream()
            self._event(json.dumps(event, allow_nan=False))
        self._event("[DONE]")
        self._end_stream()

    def _begin_stream(self) -> None:
        self._status, self._streaming = 200, True
        self._chunked = self.request_version != "HTTP/1.0"
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Cache-Control", "no-cache")
        if self._chunked:
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.close_connection = True
        self.end_headers()

    def _end_stream(self) -> None:
        if self._chunked:
            self.wfile.write(b"0\r\n\r\n")

    def _event(self, data: str) -> None:
        event = f"data: {data}\n\n".encode()
        self.wfile.write(b"%x\r\n%b\r\n" % (len(event), event) if self._chunked else event)
        self.wfile.flush()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Called by the base class for what is no HTTP; the same form as our own errors."""
        self.request_version = self.protocol_version  # else rubbish gets an answer without status
        self.close_connection = True
        self._openai, self._streaming, self._unread = False, False, 0
        self._refuse(Refused(code, message or "not a request this server knows"))

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing per request; metrics count them."""


_GET: Pages = {
    "/healthz": Handler._healthz,
    "/health": Handler._health,
    "/metrics": Handler._metrics,
    "/v1/models": Handler._models,
}
_POST: Pages = {
    "/generate": Handler._generate,
    "/v1/generate": Handler._generate,
    "/v1/completions": Handler._completions,
    "/v1/chat/completions": Handler._chat,
    **dict.fromkeys(control_pages.PAGES, Handler._control),
}
