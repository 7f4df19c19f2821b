"""TCP ports of the roles on this machine."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request

from infra.contracts.errors import ConfigError


def free_port(host: str) -> int:
    """Return a port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def claim_port(host: str, port: int) -> int:
    """Return ``port`` after checking that it is free, or a free one when it is 0.

    Raises:
        ConfigError: somebody listens there, or the host is not this machine.
    """
    if port == 0:
        return free_port(host)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as e:
            raise ConfigError(
                f"[endpoint]: {host}:{port} cannot be used ({e.strerror}); stop what listens "
                "there, set endpoint.port to another, or to 0 for any free one"
            ) from e
    return port


def served_version(endpoint: str) -> int | None:
    """Return the policy version that the worker at ``endpoint`` has, None while it has none."""
    try:
        with urllib.request.urlopen(f"{endpoint}/healthz", timeout=1.0) as answer:
            version = json.load(answer).get("version")
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return None
    return None if version is None or version < 0 else int(version)
