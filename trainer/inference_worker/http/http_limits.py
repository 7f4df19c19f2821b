"""What the server allows, who may ask, and how a refusal looks."""

from __future__ import annotations

import hmac
from dataclasses import dataclass

from infra.contracts.errors import InferenceError
from trainer.inference_worker.generation_job import QueueFull


@dataclass(frozen=True, kw_only=True)
class HttpLimits:
    """How much one server takes on."""

    body_bytes: int = 8 << 20
    connections: int = 512
    """One thread each. As many again get a 503; beyond that they are closed at once."""
    idle_secs: float = 120.0
    """A connection that sends or takes nothing for so long is closed."""
    request_secs: float = 600.0
    """Deadline of a request that names none (OpenAI's)."""
    no_weights_secs: float = 300.0
    """After so long without a first version requests are turned away instead of queued."""
    retry_secs: float = 1.0
    """``Retry-After`` of a 429 or 503. A connection that comes back sooner is held until then."""
    drain_secs: float = 20.0
    """What runs at SIGTERM may take so much longer."""

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} = {getattr(self, name)}; must be positive")


class Refused(Exception):
    """A request that gets an error status.

    Args:
        status: HTTP status.
        message: what was given, what is allowed.
        param: the member of the body that is wrong, if it is one.
        code: OpenAI's short name for some errors.
        retryable: whether the same request may succeed later; sent with Retry-After.
    """

    def __init__(
        self, status: int, message: str, *, param: str = "", code: str = "", retryable: bool = False
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.retryable = status, param, code, retryable

    def native(self) -> dict[str, object]:
        """The body on Headrace's own pages."""
        return {"error": str(self), "retryable": self.retryable}

    def openai(self) -> dict[str, object]:
        """The body on OpenAI's pages."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {
            "message": str(self),
            "type": "rate_limit_error" if self.status == 429 else kind,
            "param": self.param or None,
            "code": self.code or None,
        }
        return {"error": error}


def refusal(error: InferenceError, *, wrong: int = 422) -> Refused:
    """Give the scheduler's error its status: 429 full, 503 later or elsewhere, else ``wrong``."""
    if isinstance(error, QueueFull):
        return Refused(429, str(error), code="queue_full", retryable=True)
    status = 503 if error.retryable else wrong
    return Refused(status, str(error), retryable=error.retryable)


def check_token(token: str, header: str) -> None:
    """Compare in constant time. Raises ``Refused`` (401)."""
    kind, _, shown = header.partition(" ")
    same = hmac.compare_digest(shown.strip().encode(errors="replace"), token.encode())
    if token and not (same and kind.lower() == "bearer"):
        raise Refused(
            401, "the token is missing or wrong; send Authorization: Bearer", code="invalid_api_key"
        )
