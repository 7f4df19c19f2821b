"""``GET /metrics``: counters and gauges as Prometheus reads them."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

from trainer.inference_worker.totals import Totals

_TOTALS = {
    "tokens": "sampled_tokens_total",
    "prompt_tokens": "prompt_tokens_total",
    "rollouts": "rollouts_total",
    "requests": "groups_total",
    "expired": "groups_expired_total",
    "cancelled": "groups_cancelled_total",
    "aborted": "groups_aborted_total",
    "segments": "segments_total",
    "steps": "decode_steps_total",
    "busy_secs": "decode_busy_seconds_total",
    "swaps": "weight_swaps_total",
    "recomputed": "slots_recomputed_total",
}
"""Field of ``Totals``: metric."""
_GAUGES = {
    "busy": "busy_slots",
    "slots": "slots",
    "queued": "queued_groups",
    "version": "policy_version",
}
"""Member of the health record: metric."""


class ServerMetrics:
    """Counts requests by page and status. Safe from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter[tuple[str, int]] = Counter()
        self._secs: Counter[str] = Counter()

    def observe(self, page: str, status: int, secs: float) -> None:
        """Count one answer; 499: the caller went away first."""
        with self._lock:
            self._requests[page, status] += 1
            self._secs[page] += secs

    def render(self, health: dict[str, Any], totals: Totals, connections: int) -> str:
        """The page's text."""
        with self._lock:
            requests, secs = self._requests.copy(), self._secs.copy()
        lines: list[str] = []

        def family(name: str, kind: str, values: dict[str, float]) -> None:
            lines.append(f"# TYPE headrace_worker_{name} {kind}")
            lines.extend(f"headrace_worker_{name}{k} {v}" for k, v in values.items())

        for field, name in _TOTALS.items():
            family(name, "counter", {"": getattr(totals, field)})
        for member, name in _GAUGES.items():
            if member in health:
                family(name, "gauge", {"": health[member]})
        trouble = health.get("weights", "ok") != "ok"
        family("weights_trouble", "gauge", {"": int(trouble)})
        family("paused", "gauge", {"": int(bool(health.get("paused")))})
        family("draining", "gauge", {"": int(health["status"] == "draining")})
        sync = {f'{{part="{part}"}}': secs for part, secs in health.get("sync_secs", {}).items()}
        family("weight_sync_seconds", "gauge", sync)
        family("connections", "gauge", {"": connections})
        family(
            "http_requests_total",
            "counter",
            {f'{{page="{p}",status="{s}"}}': n for (p, s), n in sorted(requests.items())},
        )
        counts: Counter[str] = Counter()
        for (page, _), number in requests.items():
            counts[page] += number
        latency = "http_request_seconds"
        lines.append(f"# TYPE headrace_worker_{latency} summary")
        for page, number in sorted(counts.items()):
            label = f'{{page="{page}"}}'
            lines.append(f"headrace_worker_{latency}_sum{label} {secs[page]:.6f}")
            lines.append(f"headrace_worker_{latency}_count{label} {number}")
        return "\n".join(lines) + "\n"
