"""Tables for the transitions of the control state."""

from __future__ import annotations

from dataclasses import replace

import pytest

from infra.contracts import ids
from infra.contracts.manifests import ControlState, Flight, GroupEntry
from infra.run_config import AdmissionConfig
from pipelines.controller import state as control

NOW, LEASE = 1000.0, 60.0
CONFIG = AdmissionConfig(groups_per_step=2, lease_secs=LEASE, max_attempts=2, max_refill=2)
LIMITS = control.Limits(admission=CONFIG, updates=3)


def name(index: int, position: int | None = None) -> str:
    return ids.group_id("run", f"prompt-{index if position is None else position}", index)


def flight(index: int, *, attempt: int = 1, until: float = NOW + LEASE) -> Flight:
    return Flight(
        admission_index=index,
        group_id=name(index),
        min_version=0,
        attempt=attempt,
        leased_until=until,
        position=index,
    )


def entry(index: int, version: int = 0) -> GroupEntry:
    return GroupEntry(
        group_id=name(index),
        admission_index=index,
        prompt_id="",
        rollouts=2,
        oldest_version=version,
        newest_version=version,
        reward_mean=0.5,
        pass_rate=0.5,
        tokens=4,
    )


def state(*flights: Flight, **fields: object) -> ControlState:
    return ControlState(run="run", epoch=1, flights=flights, **fields)


def view(ended: dict[int, str] | None = None, *waiting: int, **fields: object) -> control.View:
    states = {name(i): end for i, end in (ended or {}).items()}
    fields = {"steps": 0, "version": 0, **fields}
    return control.View(ended=states, waiting=tuple(map(entry, waiting)), **fields)


def draw(cursor: int, retired: object) -> tuple[int, str] | None:
    while cursor < 12:
        if f"prompt-{cursor}" not in retired:
            return cursor, f"prompt-{cursor}"
        cursor += 1
    return None


def advance(
    before: ControlState, seen: control.View, limits: control.Limits = LIMITS, **signals: object
) -> control.Pass:
    now = control.Signals(now=NOW, **signals)
    return control.advance(before, seen, now, limits, draw, "set")


def indices(flights: tuple[Flight, ...]) -> list[int]:
    return [f.admission_index for f in flights]


def test_a_fresh_run_admits_one_steps_groups() -> None:
    first = control.start(None, run="run", prompts_digest="d", now=NOW, lease_secs=LEASE)
    done = advance(first, view())
    assert indices(done.publish) == [0, 1] and done.state.flights == done.publish
    assert done.publish[0] == replace(flight(0), group_id=ids.group_id("run", "prompt-0", 0))
    assert (done.state.next_index, done.state.cursors, done.state.epoch) == (2, {"set": 2}, 1)
    assert done.state.prompts_digest == "d" and not done.done


def test_before_the_first_version_nothing_is_admitted() -> None:
    done = advance(state(), view(version=None))
    assert not done.publish and done.waiting_for == "the trainer's first version"


def test_a_restart_opens_an_epoch_and_renews_leases() -> None:
    old = state(
        flight(3, attempt=2, until=1.0),
        next_index=4,
        untrainable_streak=7,
        stop_reason="drained",
        draining=True,
        reissued=5,
    )
    new = control.start(old, run="run", prompts_digest="", now=NOW, lease_secs=LEASE)
    assert new.epoch == 2 and new.flights == (flight(3, attempt=2),)
    assert (new.next_index, new.reissued, new.untrainable_streak) == (4, 5, 0)
    assert not new.draining and not new.stop_reason


@pytest.mark.parametrize(
    ("ended", "left", "streak"),
    [
        ({}, [0, 1], 3),
        ({0: "waiting"}, [1], 3),
        ({0: "trained"}, [1], 3),
        ({0: "rejected"}, [1], 4),
        ({0: "failed", 1: "dropped"}, [], 5),
        ({7: "rejected"}, [0, 1], 3),  # not in flight: counted before
    ],
)
def test_observe(ended: dict[int, str], left: list[int], streak: int) -> None:
    before = state(flight(0), flight(1), untrainable_streak=3)
    after = control.observe(before, view(ended))
    assert indices(after.flights) == left and after.untrainable_streak == streak


def test_a_step_resets_the_streak() -> None:
    before = state(flight(0), untrainable_streak=3, steps_seen=1)
    after = control.observe(before, view({0: "rejected"}, steps=2))
    assert (after.untrainable_streak, after.steps_seen) == (1, 2)


OVER = NOW - 1


@pytest.mark.parametrize(
    ("flights", "signals", "published", "given_up", "reissued"),
    [
        ([flight(0)], {}, [], [], 0),
        ([flight(0, until=NOW)], {}, [(0, 2)], [], 1),
        ([flight(0, until=OVER), flight(1)], {}, [(0, 2)], [], 1),
        ([flight(0, attempt=2, until=OVER)], {}, [], [0], 0),
        ([flight(0), flight(1)], {"dead": frozenset({name(1)})}, [(1, 2)], [], 1),
        ([flight(0, attempt=2)], {"dead": frozenset({name(0)})}, [], [0], 0),
        ([flight(0, until=OVER)], {"queued": frozenset({name(0)})}, [(0, 1)], [], 0),
    ],
    ids=["runs", "ends now", "one of two", "out of attempts", "dead", "dead again", "in the queue"],
)
def test_leases(flights, signals, published, given_up, reissued) -> None:
    after, publish, give_up = control.expire(
        state(*flights), control.Signals(now=NOW, **signals), CONFIG
    )
    assert [(f.admission_index, f.attempt) for f in publish] == published
    assert indices(give_up) == given_up and after.reissued == reissued
    assert indices(after.flights) == [f.admission_index for f in flights]
    assert all(f.leased_until == NOW + LEASE for f in publish)


def test_reissues_bypass_the_capacity() -> None:
    done = advance(state(flight(0, until=OVER), flight(1), next_index=2), view())
    assert indices(done.publish) == [0] and done.publish[0].group_id == name(0)


def test_a_reject_is_refilled_on_policy() -> None:
    before = state(flight(0), flight(1), next_index=2, cursors={"set": 2})
    done = advance(before, view({0: "rejected", 1: "waiting"}, 1))
    assert indices(done.publish) == [2] and done.state.refills == 1 and done.accepted == 1
    assert done.publish[0].group_id == name(2)


def test_a_group_that_came_back_too_late_holds_no_slot() -> None:
    """Step 1 was trained; group 0, once rejected, is waiting with version 0 and never will be."""
    before = state(next_index=3, cursors={"set": 3}, steps_seen=1)
    done = advance(before, view({}, 0, steps=1, version=1))
    assert indices(done.publish) == [3, 4]


def test_retired_prompts_are_passed_over_from_now_on() -> None:
    done = advance(state(next_index=0), view(), retire=("prompt-1", "prompt-0"))
    assert [f.position for f in done.publish] == [2, 3] and indices(done.publish) == [0, 1]
    assert done.state.retired == {"prompt-1": 0, "prompt-0": 0} and done.state.cursors["set"] == 4
    again = advance(done.state, view(), retire=("prompt-1", "prompt-9"))
    assert again.state.retired["prompt-1"] == 0 and again.state.retired["prompt-9"] == 2


STOPS = [
    ("updates", {"next_index": 6}, view(steps=3, version=3), {}, "updates_reached", True),
    ("drain", {}, view(), {"drain": True}, "drained", True),
    ("both", {}, view(steps=3, version=3), {"drain": True}, "updates_reached", True),
    ("streak", {"untrainable_streak": 5}, view(), {}, "no_trainable_groups", True),
    ("streak not over", {"untrainable_streak": 4}, view(), {}, "", False),
    ("step is possible", {"untrainable_streak": 9}, view({}, 0, 1), {}, "", False),
    ("prompts", {"cursors": {"set": 12}}, view(), {}, "prompts_exhausted", True),
    ("stays", {"stop_reason": "no_trainable_groups"}, view(), {}, "no_trainable_groups", True),
]  # fmt: skip


@pytest.mark.parametrize("case", STOPS, ids=[case[0] for case in STOPS])
def test_stop(case: tuple) -> None:
    _, fields, seen, signals, reason, over = case
    done = advance(state(**{"next_index": 2, **fields}), seen, **signals)
    assert done.state.stop_reason == reason and done.done == over
    assert done.state.draining == bool(reason)


def test_a_stop_waits_for_what_is_in_flight() -> None:
    done = advance(state(flight(0), next_index=1), view(), drain=True)
    assert not done.done and not done.publish
    assert done.waiting_for == "1 groups in flight to end (drained); oldest 0, attempt 1"
    assert advance(done.state, view({0: "failed"}), drain=True).done


def test_the_last_prompt_is_still_admitted() -> None:
    done = advance(state(cursors={"set": 11}), view())
    assert [f.position for f in done.publish] == [11] and not done.done
    assert done.state.stop_reason == "prompts_exhausted"


def test_pause_stops_admission_and_nothing_else() -> None:
    before = state(flight(0, until=OVER), next_index=1)
    paused = advance(before, view(), pause=True)
    assert indices(paused.publish) == [0] and paused.state.paused and not paused.done
    lifted = advance(paused.state, view())
    assert indices(lifted.publish) == [1] and not lifted.state.paused


def test_nothing_beyond_the_last_step_but_for_refills() -> None:
    before = state(next_index=7, cursors={"set": 7})
    lag = control.Limits(admission=replace(CONFIG, max_lag=3), updates=3)
    assert not advance(before, view({}, 4, 5, steps=2, version=2), lag).publish  # 1 refilled
    assert indices(advance(before, view({}, 4, steps=2, version=2), lag).publish) == [7]
