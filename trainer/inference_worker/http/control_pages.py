"""For who is on call: pause, resume, abort and drain, as pages that take a small JSON object."""

from __future__ import annotations

import json
import typing
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from trainer.inference_worker.http.http_limits import Refused
from trainer.inference_worker.job_queue import Pause

if TYPE_CHECKING:
    from trainer.inference_worker.server import WorkerServer

PAUSES = typing.get_args(Pause)


def pause(server: WorkerServer, body: bytes) -> dict[str, Any]:
    """``{"mode": "finish" | "in_place" | "abort"}``; finish if nothing is said."""
    mode = _members(body, "mode").get("mode", PAUSES[0])
    if mode not in PAUSES:
        raise Refused(400, f"mode = {mode!r}; one of {', '.join(PAUSES)}")
    server.backend.scheduler.pause(mode)
    return {}


def resume(server: WorkerServer, body: bytes) -> dict[str, Any]:
    """Undo a pause."""
    _members(body)
    server.backend.scheduler.resume()
    return {}


def abort(server: WorkerServer, body: bytes) -> dict[str, Any]:
    """``{"request_id": "..."}`` or ``{"all": true}``; answers how many groups are ended."""
    asked = _members(body, "request_id", "all")
    request_id, everything = asked.get("request_id"), asked.get("all", False)
    if isinstance(request_id, str) and request_id and everything is False:
        return {"aborted": server.backend.scheduler.abort(request_id)}
    if request_id is None and everything is True:
        return {"aborted": server.backend.scheduler.abort()}
    raise Refused(400, 'give either "request_id": "..." or "all": true')


def drain(server: WorkerServer, body: bytes) -> dict[str, Any]:
    """What SIGTERM does."""
    _members(body)
    server.stop_serving()
    return {}


def _members(body: bytes, *known: str) -> dict[str, Any]:
    """The body's object; nothing at all is an empty one. Raises ``Refused``."""
    try:
        members = json.loads(body or b"{}")
    except (ValueError, RecursionError) as e:
        raise Refused(400, f"not valid JSON: {e}") from e
    if not isinstance(members, dict):
        raise Refused(400, "the body must be a JSON object")
    for name in members:
        if name not in known:
            allowed = ", ".join(known) or "none"
            raise Refused(400, f"unknown member {name[:60]!r}; allowed: {allowed}")
    return members


PAGES: dict[str, Callable[[WorkerServer, bytes], dict[str, Any]]] = {
    "/v1/pause": pause,
    "/v1/resume": resume,
    "/v1/abort": abort,
    "/v1/drain": drain,
}
