"""How far rollouts may run ahead of the trainer (DESIGN section 5): the two halves of one bound.

Pure functions. The controller asks ``may_admit``, the trainer ``choose_step``; together they keep,
with G = groups_per_step, L = max_lag and v the trainer's version, the promise

    for every version m: pending groups with oldest version <= m  <=  (m + L - v + 1) * G

(pending: in flight, or waiting). The right side counts the places left in steps that may still
consume such a group, so keeping it means that oldest-first steps never meet a group beyond L.
``may_admit`` keeps it because v published <= v and v steps have consumed v * G groups;
``choose_step`` keeps it by waiting. Looking only at the oldest group is not enough: with L = 2,
G = 1 two groups of version 0 can be left for the one step that may still take them.
``tests/pipelines/controller/test_admission_model.py`` explores all interleavings.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from infra.contracts.manifests import Flight, GroupEntry
from infra.run_config import AdmissionConfig


def may_admit(
    *,
    accepted: int,
    in_flight: int,
    next_index: int,
    refills: int,
    version: int,
    updates: int,
    config: AdmissionConfig,
) -> int:
    """Return how many groups may be admitted now.

    Args:
        accepted: groups trained, plus ``usable`` waiting ones.
        in_flight: admitted groups without a terminal record.
        next_index: the next admission index.
        refills: admitted groups that ended, or will end, without being trained.
        version: the *published* policy version (``weights/LATEST``).
        updates: steps the run is to make.
    """
    capacity = (config.max_lag + version + 1) * config.groups_per_step
    return max(
        0,
        min(
            capacity - accepted - in_flight,
            config.in_flight_limit - in_flight,
            updates * config.groups_per_step + refills - next_index,
        ),
    )


def refusal(entry: GroupEntry, version: int, config: AdmissionConfig) -> str:
    """Say why a waiting group cannot be trained on at ``version`` or later; ``""`` if it can."""
    if entry.newest_version > version:
        return f"future: sampled from version {entry.newest_version}, the trainer has {version}"
    lag = version - entry.oldest_version
    if config.on_stale != "train" and lag > config.max_lag:
        return f"stale: lag {lag} > max_lag {config.max_lag}"
    return ""


def usable(waiting: Iterable[GroupEntry], version: int, config: AdmissionConfig) -> int:
    """Count the waiting groups that still can be trained on.

    The others hold no slot: a drop is recorded only with a step, and a step may need that slot.
    """
    return sum(not refusal(entry, version, config) for entry in waiting)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepChoice:
    """What the next step consumes, or why there is none yet."""

    groups: tuple[GroupEntry, ...] = ()
    """Exactly ``groups_per_step``, in training order; empty while ``wait_for`` says why."""
    dropped: tuple[tuple[str, str], ...] = ()
    """(group id, reason) to record as dropped with this step."""
    wait_for: str = ""
    """Whom the trainer waits for and why, in words."""
    lag_max: int = 0
    violations: int = 0
    """Groups beyond ``max_lag`` that are trained all the same (policy ``train``)."""


def choose_step(
    waiting: Iterable[GroupEntry],
    flights: Iterable[Flight],
    version: int,
    config: AdmissionConfig,
    *,
    next_index: int,
) -> StepChoice:
    """Choose the groups of the step that turns ``version`` into ``version + 1``.

    Oldest policy version first, then admission index. Under ``wait`` no step starts that could
    leave more groups of some age than the steps within ``max_lag`` can still take; it waits for
    those in flight. If there are none (a group was accepted after its slot had been given away),
    the newest surplus is dropped.

    Args:
        waiting: committed, trainable groups that no ledger entry names.
        flights: of ``control/state.json``, read *before* ``waiting`` was refreshed, so that a
            group is in one of the two. Leave out those that have ended otherwise.
        version: the trainer's own version, which may be ahead of the published one.
        next_index: of the same ``control/state.json``. Groups admitted since then are left for the
            next look: one of them could have overtaken another that ``flights`` does not show.
    """
    waiting = [e for e in waiting if e.admission_index < next_index]
    waiting.sort(key=lambda e: (e.oldest_version, e.admission_index))
    refused = [(e.group_id, why) for e in waiting if (why := refusal(e, version, config))]
    live = [e for e in waiting if not refusal(e, version, config)]
    groups, rest = live[: config.groups_per_step], live[config.groups_per_step :]
    known = {e.group_id for e in waiting}
    flying = sorted((f for f in flights if f.group_id not in known), key=_flight_age)
    if len(groups) < config.groups_per_step:
        return StepChoice(
            wait_for=f"{config.groups_per_step} trainable groups: {len(groups)} are waiting, "
            f"{len(flying)} in flight"
        )
    surplus: list[GroupEntry] = []
    if config.on_stale == "wait":
        late, surplus = _overdue(rest, flying, version, config)
        if late is not None:
            return StepChoice(
                wait_for=f"group {late.admission_index} ({late.group_id[:8]}), in flight since "
                f"version {late.min_version}, attempt {late.attempt}: step {version + 1} without "
                f"it could leave it beyond max_lag = {config.max_lag}"
            )
    lags = [version - e.oldest_version for e in groups]
    why = f"surplus: no place left in the steps within max_lag {config.max_lag}"
    return StepChoice(
        groups=tuple(groups),
        dropped=(*refused, *((e.group_id, why) for e in surplus)),
        lag_max=max(lags),
        violations=sum(lag > config.max_lag for lag in lags),
    )


def _flight_age(flight: Flight) -> tuple[int, int]:
    return flight.min_version, flight.admission_index


def _overdue(
    rest: Sequence[GroupEntry], flying: Sequence[Flight], version: int, config: AdmissionConfig
) -> tuple[Flight | None, list[GroupEntry]]:
    """Find the flight to wait for, or else the waiting groups for which no step is left.

    ``rest`` (not chosen now) and ``flying`` are sorted by age. A group of oldest version m fits
    into the steps at versions ``version + 1 .. m + max_lag``.
    """
    kept = list(rest)
    surplus: list[GroupEntry] = []
    ages = {e.oldest_version for e in rest} | {f.min_version for f in flying}
    for oldest in sorted(ages):
        room = max(0, oldest + config.max_lag - version) * config.groups_per_step
        flights = sum(f.min_version <= oldest for f in flying)
        old = sum(e.oldest_version <= oldest for e in kept)
        if flights + old > room:
            if flights:
                return flying[0], []
            surplus += kept[room:old]
            del kept[room:old]
    return None, surplus
