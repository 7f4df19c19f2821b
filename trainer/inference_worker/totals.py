"""What the worker has done so far, and the metrics of an interval."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Totals:
    """Running totals since the start; written by the engine's thread only."""

    tokens: int = 0
    """Sampled tokens that reached a response."""
    prompt_tokens: int = 0
    """Tokens prefilled: of prompts once per group, and of what was begun elsewhere or before."""
    rollouts: int = 0
    segments: int = 0
    """Samples that were answered unended."""
    requests: int = 0
    expired: int = 0
    cancelled: int = 0
    """Requests whose callers had all gone."""
    aborted: int = 0
    """Groups ended from outside, without an answer."""
    steps: int = 0
    slot_steps: int = 0
    """Slots that were busy, summed over steps."""
    busy_secs: float = 0.0
    swaps: int = 0
    recomputed: int = 0
    """Slots whose keys and values were made again after a swap."""


def rates(before: Totals, after: Totals, secs: float, slots: int) -> dict[str, float]:
    """Metrics of an interval from two running totals."""
    steps = after.steps - before.steps
    values = {
        "worker/decode/tokens_per_sec": (after.tokens - before.tokens) / secs,
        "worker/decode/busy_share": (after.busy_secs - before.busy_secs) / secs,
        "worker/prefill/tokens_per_sec": (after.prompt_tokens - before.prompt_tokens) / secs,
        "worker/requests_expired": float(after.expired - before.expired),
        "worker/rollouts": float(after.rollouts - before.rollouts),
    }
    if steps:
        values["worker/decode/slot_share"] = (after.slot_steps - before.slot_steps) / steps / slots
    return values
