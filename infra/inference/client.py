"""The inference client: how the Beam side asks a worker for rollouts.

Implementations: ``http_client`` (a worker over HTTP, with retries) and ``fake_client`` (predictable
by hand, for tests). Both pass ``tests/contracts/inference_client_contract.py``.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol

from infra.contracts.records import GenerateReply, GenerateRequest


class InferenceClient(Protocol):
    """Asynchronous by thread pool: submit many, gather later; safe from several threads."""

    def submit(self, request: GenerateRequest) -> Future[GenerateReply]:
        """Start one request. The future raises ``InferenceError`` after the retries are used up."""

    def close(self) -> None:
        """Stop accepting work and release connections."""
