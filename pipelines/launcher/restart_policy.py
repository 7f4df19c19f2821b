"""What to do when a role's process ends: pure decisions, the clock handed in.

A role that dies is started again, soon at first and then more slowly, until it has died too often.
Two exit codes are never answered with a restart: *fenced* (another incarnation lives) and
*configuration* (it would fail the same way again).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from infra.contracts.errors import ConfigError, Fenced, Preempted


class Action(StrEnum):
    FINISHED = "finished"
    RESTART = "restart"
    GIVE_UP = "give_up"


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """How often, and how soon, a dead role is started again."""

    max_restarts: int = 5
    """Restarts of one role within the window; the next death ends the run."""
    window_secs: float = 600.0
    backoff_secs: float = 0.25
    """Delay before the first restart in the window; doubles with each further one."""
    longest_backoff_secs: float = 30.0


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The decision about one ended process."""

    action: Action
    delay_secs: float = 0.0
    why: str = ""


def judge_exit(
    policy: RestartPolicy,
    *,
    exit_code: int,
    ends_by_itself: bool,
    repeatable: bool = True,
    restarts: Sequence[float],
    now: float,
) -> Verdict:
    """Decide about a process that ended.

    Args:
        policy: the bounds.
        exit_code: as ``subprocess`` reports it; negative is the signal that killed it.
        ends_by_itself: whether exit code 0 means that the role's work is done.
        repeatable: False for work that would fail the same way again.
        restarts: times of this role's earlier restarts, seconds on the clock of ``now``.
        now: seconds.
    """
    if exit_code == 0 and ends_by_itself:
        return Verdict(action=Action.FINISHED)
    how = describe_exit(exit_code)
    if exit_code in (Fenced.exit_code, ConfigError.exit_code) or (exit_code > 0 and not repeatable):
        return Verdict(action=Action.GIVE_UP, why=how)
    recent = sum(now - t < policy.window_secs for t in restarts)
    if recent >= policy.max_restarts:
        why = f"{how}, after {recent} restarts within {policy.window_secs:.0f} s"
        return Verdict(action=Action.GIVE_UP, why=why)
    delay = min(policy.backoff_secs * 2**recent, policy.longest_backoff_secs)
    return Verdict(action=Action.RESTART, delay_secs=delay, why=how)


def describe_exit(exit_code: int) -> str:
    """Say how a process ended, in words."""
    if exit_code < 0:
        return f"killed by signal {-exit_code}"
    named = {
        0: "ended without being asked",
        ConfigError.exit_code: "refused its configuration",
        Fenced.exit_code: "another incarnation has taken over",
        Preempted.exit_code: "was asked to stop and saved",
    }
    return (
        f"{named[exit_code]} (exit code {exit_code})"
        if exit_code in named
        else (f"failed with exit code {exit_code}")
    )
