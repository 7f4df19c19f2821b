"""The controller's transitions: pure functions on ``ControlState`` (DESIGN section 5).

One pass is ``advance``: observe what ended, expire leases, decide on a stop, admit. Its result is
persisted by compare-and-swap *before* anything is published, so a group is admitted exactly once
whatever happens in between; what was persisted and never published is published again by the
next incarnation (``start``) or when its lease ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from infra import admission
from infra.contracts import ids
from infra.contracts.manifests import ControlState, Flight, GroupEntry
from infra.run_config import AdmissionConfig

ENDED_UNTRAINED = ("rejected", "failed", "dropped")

UPDATES_REACHED = "updates_reached"
DRAINED = "drained"
NO_TRAINABLE_GROUPS = "no_trainable_groups"
PROMPTS_EXHAUSTED = "prompts_exhausted"

Draw = Callable[[int, Mapping[str, int]], tuple[int, str] | None]
"""(first position to look at, retired) -> (position, prompt id) of the next admissible prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What storage says. Read ``version`` last: counts that are older are only too high."""

    ended: Mapping[str, str]
    """Group id -> ``waiting|trained|rejected|failed|dropped``, at least for ended flights."""
    waiting: tuple[GroupEntry, ...]
    steps: int
    """The newest ledger step; 0 before the first."""
    version: int | None
    """The published policy version; None before the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signals:
    """What else a pass must know: time, operators' wishes, the fate of published messages."""

    now: float
    drain: bool = False
    pause: bool = False
    retire: tuple[str, ...] = ()
    """Prompt ids not to be admitted any more."""
    dead: frozenset[str] = frozenset()
    """Groups delivered to a pipeline process that died: their leases end at once."""
    queued: frozenset[str] = frozenset()
    """Groups still in the queue: nobody works on them, so their leases are renewed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The part of the configuration that admission depends on."""

    admission: AdmissionConfig
    updates: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """What to do after persisting ``state``."""

    state: ControlState
    publish: tuple[Flight, ...] = ()
    """Groups to publish: new ones, and those whose lease ended."""
    give_up: tuple[Flight, ...] = ()
    """Groups out of attempts, to be committed to ``failures/``."""
    done: bool = False
    accepted: int = 0
    waiting_for: str = ""


def start(
    stored: ControlState | None, *, run: str, prompts_digest: str, now: float, lease_secs: float
) -> ControlState:
    """Open a new fencing epoch. Everything in flight gets a new lease: the queue is gone.

    Stop reason and streak are forgotten: whoever starts the controller again wants it to go on.
    """
    if stored is None:
        return ControlState(run=run, epoch=1, prompts_digest=prompts_digest)
    return replace(
        stored,
        epoch=stored.epoch + 1,
        flights=tuple(replace(f, leased_until=now + lease_secs) for f in stored.flights),
        untrainable_streak=0,
        paused=False,
        draining=False,
        stop_reason="",
    )


def observe(state: ControlState, view: View) -> ControlState:
    """Take ended groups out of flight and count untrainable ones since the last step."""
    ends = [view.ended.get(f.group_id) for f in state.flights]
    untrained = sum(end in ENDED_UNTRAINED for end in ends)
    return replace(
        state,
        flights=tuple(f for f, end in zip(state.flights, ends, strict=True) if end is None),
        untrainable_streak=untrained
        + (state.untrainable_streak if view.steps <= state.steps_seen else 0),
        steps_seen=max(state.steps_seen, view.steps),
    )


def expire(
    state: ControlState, signals: Signals, config: AdmissionConfig
) -> tuple[ControlState, tuple[Flight, ...], tuple[Flight, ...]]:
    """Handle leases that are over: (state, flights to publish again, flights to give up).

    A group to be given up stays in flight until its record in ``failures/`` is seen.
    """
    kept, publish, give_up = [], [], []
    lease = signals.now + config.lease_secs
    for flight in state.flights:
        over = flight.leased_until <= signals.now or flight.group_id in signals.dead
        renewed = flight
        if over and flight.group_id in signals.queued:
            publish.append(renewed := replace(flight, leased_until=lease))
        elif over and flight.attempt < config.max_attempts:
            renewed = replace(flight, leased_until=lease, attempt=flight.attempt + 1)
            publish.append(renewed)
        elif over:
            give_up.append(flight)
        kept.append(renewed)
    reissued = sum(f.group_id not in signals.queued for f in publish)
    state = replace(state, flights=tuple(kept), reissued=state.reissued + reissued)
    return state, tuple(publish), tuple(give_up)


def admit(
    state: ControlState, count: int, *, version: int, draw: Draw, source: str, leased_until: float
) -> tuple[ControlState, tuple[Flight, ...], bool]:
    """Admit up to ``count`` prompts: (state, new flights, whether the prompts are exhausted)."""
    new: list[Flight] = []
    cursor = state.cursors.get(source, 0)
    while len(new) < count and (drawn := draw(cursor, state.retired)) is not None:
        position, prompt_id = drawn
        cursor = position + 1
        index = state.next_index + len(new)
        new.append(
            Flight(
                admission_index=index,
                group_id=ids.group_id(state.run, prompt_id, index),
                min_version=version,
                attempt=1,
                leased_until=leased_until,
                position=position,
            )
        )
    state = replace(
        state,
        next_index=state.next_index + len(new),
        flights=(*state.flights, *new),
        cursors={**state.cursors, source: cursor},
    )
    return state, tuple(new), len(new) < count


def retire(state: ControlState, prompt_ids: Iterable[str]) -> ControlState:
    """Stop admitting these prompts, from the next admission index on; the first time counts."""
    new = {p: state.next_index for p in prompt_ids if p not in state.retired}
    return replace(state, retired={**state.retired, **new}) if new else state


def stop_reason(
    state: ControlState, view: View, signals: Signals, usable: int, limits: Limits
) -> str:
    """Say why admission must end for good; ``""`` while it need not.

    The streak counts only while the trainer lacks groups: rejects that pile up behind a long
    step are no sign that nothing can be trained.
    """
    config = limits.admission
    if view.version is not None and view.version >= limits.updates:
        return UPDATES_REACHED
    if signals.drain:
        return DRAINED
    if state.stop_reason in (NO_TRAINABLE_GROUPS, PROMPTS_EXHAUSTED):
        return state.stop_reason
    streak = state.untrainable_streak > config.max_refill * config.groups_per_step
    return NO_TRAINABLE_GROUPS if streak and usable < config.groups_per_step else ""


def advance(
    state: ControlState, view: View, signals: Signals, limits: Limits, draw: Draw, source: str
) -> Pass:
    """Make one pass; a pure function of what was persisted, what storage says and the signals."""
    config = limits.admission
    state = retire(observe(state, view), signals.retire)
    state, publish, give_up = expire(state, signals, config)
    # Judged at the version whose ledger was read together with ``waiting``: the published one may
    # be behind the trainer's, or ahead of this view and make groups look stale that were trained.
    usable = admission.usable(view.waiting, view.steps, config)
    accepted = view.steps * config.groups_per_step + usable
    refills = state.next_index - accepted - len(state.flights)
    reason = stop_reason(state, view, signals, usable, limits)
    state = replace(
        state,
        refills=max(0, refills),
        paused=signals.pause,
        draining=bool(reason),
        stop_reason=reason,
    )
    new: tuple[Flight, ...] = ()
    if view.version is not None and not state.paused and not reason:
        count = admission.may_admit(
            accepted=accepted,
            in_flight=len(state.flights),
            next_index=state.next_index,
            refills=refills,
            version=view.version,
            updates=limits.updates,
            config=config,
        )
        lease = signals.now + config.lease_secs
        state, new, exhausted = admit(
            state, count, version=view.version, draw=draw, source=source, leased_until=lease
        )
        if exhausted:
            state = replace(state, draining=True, stop_reason=PROMPTS_EXHAUSTED)
    return Pass(
        state=state,
        publish=(*publish, *new),
        give_up=give_up,
        done=bool(state.stop_reason) and not state.flights,
        accepted=accepted,
        waiting_for=_waiting_for(state, view),
    )


def _waiting_for(state: ControlState, view: View) -> str:
    if view.version is None:
        return "the trainer's first version"
    if state.flights:
        oldest = state.flights[0]
        why = f" to end ({state.stop_reason})" if state.stop_reason else ""
        return (
            f"{len(state.flights)} groups in flight{why}; "
            f"oldest {oldest.admission_index}, attempt {oldest.attempt}"
        )
    if state.stop_reason:
        return f"nothing: {state.stop_reason}"
    if state.paused:
        return "the pause to be lifted"
    return f"the trainer: version {view.version} is published, {len(view.waiting)} groups wait"
