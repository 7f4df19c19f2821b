"""When a run ends: pure decisions about [stop]."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from infra.run_config import StopConfig

TARGET_VERSIONS = 5
"""The target pass rate is a mean over the groups of so many of the newest versions."""


@dataclass(frozen=True, kw_only=True)
class RunPosition:
    """Where a run stands, as far as [stop] asks."""

    version: int
    """Newest published version; -1 before the first."""
    wall_secs: float
    """Wall time of the run, all sessions together."""
    pass_rates: Sequence[float]
    """Training pass rate of each step up to ``version``, oldest first."""


def stop_reason(stop: StopConfig, at: RunPosition) -> str:
    """Return why the run should end now, or ``""``.

    ``updates_reached`` comes about by itself; ``target_pass_rate`` and ``wall_secs`` need a drain.
    """
    if at.version >= stop.updates:
        return "updates_reached"
    recent = at.pass_rates[-TARGET_VERSIONS:]
    if (
        stop.target_pass_rate > 0
        and len(recent) == TARGET_VERSIONS
        and sum(recent) / TARGET_VERSIONS >= stop.target_pass_rate
    ):
        return "target_pass_rate"
    if stop.wall_secs > 0 and at.wall_secs >= stop.wall_secs:
        return "wall_secs"
    return ""
