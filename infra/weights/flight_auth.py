"""Who may talk to a weight server: one shared bearer token, and TLS where certificates are given.

Without TLS a token crosses the network in the clear: fine on one machine, not beyond it.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pyarrow import flight

from infra.bearer_token import WEIGHTS, read_token
from infra.contracts.errors import ConfigError

_HEADER = "authorization"


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """What one side shows and trusts. ``repr`` shows no secret, so that no log does."""

    token: str = ""
    """Empty: the server asks for none."""
    certificate: bytes = b""
    """PEM, of a server; with it the server speaks TLS."""
    key: bytes = b""
    authority: bytes = b""
    """PEM, what a client trusts; empty: the system's authorities."""

    def __post_init__(self) -> None:
        if bool(self.certificate) != bool(self.key):
            raise ConfigError("TLS needs both a certificate and its key; give both or neither")

    def __repr__(self) -> str:
        return f"Credentials(token={bool(self.token)}, tls={bool(self.certificate)})"

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """What a client adds to each call."""
        return [(_HEADER.encode(), b"Bearer " + self.token.encode())] if self.token else []


def read_credentials(
    *,
    token_file: str = "",
    certificate_file: str = "",
    key_file: str = "",
    authority_file: str = "",
    environment: Mapping[str, str] | None = None,
) -> Credentials:
    """Read what the files hold; without a token file the token is ``HEADRACE_WEIGHTS_TOKEN``.

    Raises:
        ConfigError: a file cannot be read, or the token is empty or not printable ASCII.
    """
    return Credentials(
        token=read_token(WEIGHTS, token_file, environment),
        certificate=_read(certificate_file),
        key=_read(key_file),
        authority=_read(authority_file),
    )


class TokenCheck(flight.ServerMiddlewareFactory):
    """Refuses every call without the token, in a time that does not tell how much was right."""

    def __init__(self, token: str) -> None:
        self._wanted = b"Bearer " + token.encode()

    def start_call(self, info: flight.CallInfo, headers: Mapping[str, list]) -> None:
        shown = [v if isinstance(v, bytes) else v.encode() for v in headers.get(_HEADER, [])]
        if len(shown) != 1 or not hmac.compare_digest(shown[0], self._wanted):
            raise flight.FlightUnauthenticatedError("a token is needed")


def _read(path: str) -> bytes:
    if not path:
        return b""
    try:
        return Path(path).read_bytes()
    except OSError as e:
        raise ConfigError(f"{path}: cannot be read: {e.strerror}") from e
