"""The inference client: how the Beam side asks workers for rollouts.

``PooledClient`` asks one or several workers, native ones (``native_worker``) or engines that speak
the OpenAI protocol (``openai_worker``); ``fake_client`` is predictable by hand, for tests. All pass
``tests/contracts/inference_client_contract.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Protocol

from infra.contracts.records import GenerateReply, GenerateRequest
from infra.inference.capabilities import Capabilities


class InferenceClient(Protocol):
    """Asynchronous by thread pool: submit many, gather later; safe from several threads."""

    capabilities: Capabilities
    """What can be expected of every reply."""

    def submit(self, request: GenerateRequest) -> Future[GenerateReply]:
        """Start one request. The future raises ``InferenceError`` after the retries are used up."""

    def counters(self) -> Mapping[str, float]:
        """What happened so far, by metric name."""

    def close(self) -> None:
        """Stop accepting work and release connections."""
