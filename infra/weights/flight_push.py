"""Puts each version into a weight server while the store is being written. Never fails the trainer.

The store is the durable truth: the server shows a version only after ``commit``, which follows the
store's LATEST. A server that is gone is left alone for a while; readers use the store meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from infra.clock import Clock
from infra.contracts.errors import HeadraceError
from infra.contracts.manifests import WeightManifest
from infra.weights.flight_client import FlightWeights, provisional

REST_SECS = 30.0


class FlightPush:
    """One trainer's way into one server.

    Args:
        server: where to.
        run: its name, for the manifests that travel ahead.
        clock: spaces the attempts after an error.
    """

    def __init__(self, server: FlightWeights, run: str, clock: Clock) -> None:
        self._server, self._run, self._clock = server, run, clock
        self._pool = ThreadPoolExecutor(1, "weights-push")
        self._sending: Future[None] | None = None
        self._failed_at = 0.0
        self.trouble = ""
        """Why the server is not used now; empty when all is well."""
        self.failures = 0

    def begin(
        self, version: int, arrays: Mapping[str, np.ndarray], *, incarnation: str, epoch: int
    ) -> None:
        """Start to send; the arrays must not change before ``commit``."""
        if self.trouble and 0 <= self._clock.now() - self._failed_at < REST_SECS:
            return

        def send() -> None:
            manifest = provisional(self._run, version, arrays, incarnation=incarnation, epoch=epoch)
            self._server.put(manifest, arrays)

        self._sending = self._pool.submit(send)

    def commit(self, manifest: WeightManifest) -> None:
        """Wait until it is sent and let the server show it: LATEST is there."""
        sending, self._sending = self._sending, None
        if sending is None:
            return
        try:
            sending.result()
            self._server.commit(manifest)
            self.trouble = ""
        except HeadraceError as e:
            self.failures += 1
            self.trouble, self._failed_at = str(e), self._clock.now()

    def close(self) -> None:
        self._pool.shutdown()
        self._server.close()
