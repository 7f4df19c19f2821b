"""``summary.json``: what a run came to, in numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from infra.ledger.audit import Audit
from pipelines.launcher.launcher_state import Evaluation, LauncherState
from pipelines.launcher.progress import RunSnapshot


def build_summary(
    *,
    name: str,
    state: LauncherState,
    snapshot: RunSnapshot,
    audit: Audit,
    restarts: Mapping[str, int],
) -> dict[str, Any]:
    """Put a run's numbers together; everything in it is plain JSON.

    ``pass_rate_before`` and ``pass_rate_after`` are greedy, on the held-out prompts; None where the
    evaluation has not been made (an interrupted run, or no held-out prompts).
    """
    before, after = state.before, state.after
    return {
        "name": name,
        "stop_reason": state.stop_reason,
        "pass_rate_before": before.pass_rate if before else None,
        "pass_rate_after": after.pass_rate if after else None,
        "interval_before": list(before.interval) if before else None,
        "interval_after": list(after.interval) if after else None,
        "held_out_problems": _problems(before, after),
        "pass_at_k_before": dict(before.pass_at_k) if before else {},
        "pass_at_k_after": dict(after.pass_at_k) if after else {},
        "updates": max(snapshot.version, 0),
        "wall_seconds": round(state.wall_secs, 3),
        "sessions": state.sessions,
        "audit": audit.numbers(),
        "rollouts_trained": sum(step.rollouts for step in snapshot.trained),
        "tokens_trained": sum(step.tokens for step in snapshot.trained),
        "reasons": dict(snapshot.reasons),
        "idle_share": idle_shares(snapshot),
        "restarts": dict(restarts),
    }


def _problems(before: Evaluation | None, after: Evaluation | None) -> int:
    found = after or before
    return found.problems if found else 0


def idle_shares(snapshot: RunSnapshot) -> dict[str, float]:
    """Return each role's share of time spent waiting, as its last heartbeat tells."""
    return {
        role: round(float(beat["idle_share"]), 4)
        for role, beat in snapshot.heartbeats.items()
        if beat.get("idle_share") is not None
    }


def summary_bytes(summary: Mapping[str, Any]) -> bytes:
    return (json.dumps(summary, indent=2) + "\n").encode()
