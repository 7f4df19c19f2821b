"""The client of an endpoint, one per process: bundles come and go, connections stay."""

from __future__ import annotations

from infra.contracts.errors import ConfigError
from infra.inference.client import InferenceClient
from infra.inference.fake_client import FakeInferenceClient
from infra.inference.http_client import HttpInferenceClient


def open_client(url: str, *, threads: int = 32, retries: int = 4) -> InferenceClient:
    """Return a client for ``http://host:port``, or ``fake:`` (predictable, for dry runs).

    Raises:
        ConfigError: neither.
    """
    if url == "fake:":
        return FakeInferenceClient()
    if url.startswith("http://"):
        return HttpInferenceClient(url, threads=threads, retries=retries)
    raise ConfigError(f"endpoint '{url}': give http://host:port, or fake: for made-up rollouts")
