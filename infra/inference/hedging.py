"""When a second copy of a slow request is worth sending, and how much of that there may be."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

RECENT = 256
ENOUGH = 20
"""Fewer latencies say nothing about a quantile."""


@dataclass(frozen=True, kw_only=True)
class HedgeConfig:
    """A request slower than ``quantile`` of the recent ones goes to a second worker too."""

    quantile: float = 0.95
    share: float = 0.05
    """At most this share of all requests is sent twice."""

    def __post_init__(self) -> None:
        if not (0 < self.quantile < 1 and 0 < self.share <= 1):
            raise ValueError(
                f"quantile = {self.quantile}, share = {self.share}; quantile must be in (0, 1), "
                "share in (0, 1]"
            )


class HedgeBudget:
    """Counts requests, latencies and second copies; safe from several threads."""

    def __init__(self, config: HedgeConfig) -> None:
        self._config = config
        self._latencies: deque[float] = deque(maxlen=RECENT)
        self._requests = self._hedges = 0
        self._lock = threading.Lock()

    def delay(self) -> float | None:
        """Count a request; how long to wait before its second copy, None while nobody knows."""
        with self._lock:
            self._requests += 1
            if len(self._latencies) < ENOUGH:
                return None
            ordered = sorted(self._latencies)
            return ordered[int(self._config.quantile * len(ordered))]

    def answered(self, secs: float) -> None:
        with self._lock:
            self._latencies.append(secs)

    def spend(self) -> bool:
        """Whether one more copy is within the share; counts it if so."""
        with self._lock:
            allowed = self._hedges + 1 <= self._config.share * self._requests
            self._hedges += allowed
            return allowed
