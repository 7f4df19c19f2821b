"""The client of one native worker; a pool of one."""

from __future__ import annotations

import random

from infra.clock import Clock
from infra.contracts.errors import InferenceError
from infra.inference.native_worker import NativeWorker
from infra.inference.pooled_client import PooledClient
from infra.inference.worker import Unreachable


class HttpInferenceClient(PooledClient):
    """Client of one worker; safe from several threads. See ``PooledClient`` for the arguments."""

    def __init__(
        self,
        url: str,
        *,
        threads: int = 32,
        retries: int = 4,
        clock: Clock | None = None,
        jitter: random.Random | None = None,
    ) -> None:
        self._worker = NativeWorker(url)
        super().__init__(
            [self._worker], threads=threads, retries=retries, clock=clock, jitter=jitter
        )

    def health(self, timeout_secs: float = 5.0) -> dict[str, object]:
        """Ask ``GET /healthz`` once. Raises ``InferenceError`` when there is no good answer."""
        try:
            return self._worker.health(timeout_secs)
        except Unreachable as e:
            raise InferenceError(f"{self._worker.name}: {e}") from e
