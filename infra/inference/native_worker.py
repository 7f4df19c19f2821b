"""Our own worker over HTTP: ``POST /generate`` with a request record, a reply record back.

Repeats carry the same request id, so a worker joins them with what it is already running.
"""

from __future__ import annotations

import json
from urllib.parse import urlsplit

from infra.contracts.errors import ConfigError, InferenceError, SchemaMismatch
from infra.contracts.json_codec import from_json, to_json
from infra.contracts.records import GenerateReply, GenerateRequest
from infra.inference.capabilities import NATIVE
from infra.inference.http_connections import HttpAnswer, HttpConnections
from infra.inference.worker import Busy, Call, Failed, Unreachable

GRACE_SECS = 2.0
"""Left for the worker's own timeout error to arrive, which says more than a closed socket."""
PROBE_SECS = 2.0
BUSY = (429, 503)


class NativeWorker:
    """A worker at ``http://host:port``, shown ``token`` if there is one; see ``Worker``."""

    capabilities = NATIVE

    def __init__(self, url: str, *, token: str = "", patience_secs: float = 10.0) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or not parts.port:
            raise ConfigError(f"endpoint '{url}': give http://host:port")
        self.name = f"worker {parts.hostname}:{parts.port}"
        self._http = HttpConnections(
            parts.hostname,
            parts.port,
            patience_secs=patience_secs,
            headers={"Authorization": f"Bearer {token}"} if token else None,
        )

    def attempt(self, request: GenerateRequest, call: Call) -> GenerateReply:
        timeout = request.timeout_secs + GRACE_SECS
        answer = self._http.post(
            "/generate", to_json(request), timeout, call, lambda: self.probe(PROBE_SECS)
        )
        raise_for_status(self.name, answer)
        try:
            reply = from_json(GenerateReply, answer.body)
        except SchemaMismatch as e:
            raise Failed("the reply cannot be read") from e
        if reply.request_id != request.request_id:
            raise Failed(f"a reply to another request, {reply.request_id}")
        return reply

    def health(self, timeout_secs: float) -> dict[str, object]:
        """What ``GET /healthz`` says. Raises ``Unreachable`` when there is no good answer."""
        answer = self._http.get("/healthz", timeout_secs)
        try:
            body = json.loads(answer.body)
        except ValueError as e:
            raise Unreachable(f"{type(e).__name__}: {e}") from e
        if answer.status != 200:
            raise Unreachable(f"not healthy: {body}")
        return body

    def probe(self, timeout_secs: float) -> None:
        self.health(timeout_secs)

    def close(self) -> None:
        self._http.close()


def raise_for_status(name: str, answer: HttpAnswer) -> None:
    """Return if the answer is a 200; else raise what its status means."""
    if answer.status == 200:
        return
    text = f"status {answer.status}: {_error_text(answer.body)}"
    if answer.status in BUSY:
        raise Busy(text, answer.retry_after_secs)
    if 400 <= answer.status < 500:
        text = f"refused ({answer.status}): {_error_text(answer.body)}"
        raise InferenceError(f"{name}: {text}", retryable=False)
    raise Failed(text)


def _error_text(body: bytes) -> str:
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)[:500]
    except (ValueError, KeyError, TypeError):
        return repr(body[:200])
