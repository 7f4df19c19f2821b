"""Tables for the two halves of the gate, and the promise they keep together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.admission import StepChoice, choose_step, may_admit, refusal, usable
from infra.contracts.manifests import Flight, GroupEntry
from infra.run_config import AdmissionConfig


def config(groups: int = 2, lag: int = 0, stale: str = "wait", **more: int) -> AdmissionConfig:
    return AdmissionConfig(groups_per_step=groups, max_lag=lag, on_stale=stale, **more)


def entry(index: int, oldest: int = 0, newest: int | None = None) -> GroupEntry:
    return GroupEntry(
        group_id=f"group-{index}",
        admission_index=index,
        prompt_id=f"prompt-{index}",
        rollouts=2,
        oldest_version=oldest,
        newest_version=oldest if newest is None else newest,
        reward_mean=0.5,
        pass_rate=0.5,
        tokens=6,
    )


def flight(index: int, version: int = 0) -> Flight:
    return Flight(
        admission_index=index,
        group_id=f"group-{index}",
        min_version=version,
        attempt=1,
        leased_until=10.0,
    )


def choose(waiting, flights, version, settings, next_index=100) -> StepChoice:
    return choose_step(waiting, flights, version, settings, next_index=next_index)


@pytest.mark.parametrize(
    ("accepted", "in_flight", "next_index", "refills", "version", "settings", "expected"),
    [
        (0, 0, 0, 0, 0, config(), 2),  # on-policy: one step's groups
        (0, 0, 0, 0, 0, config(lag=2), 6),  # three steps' groups
        (0, 2, 2, 0, 0, config(), 0),
        (2, 0, 2, 0, 0, config(), 0),  # waiting for the trainer
        (2, 0, 2, 0, 1, config(), 2),  # version 1 is published
        (1, 0, 2, 1, 0, config(), 1),  # a reject freed its slot
        (2, 1, 3, 0, 5, config(max_in_flight=3), 2),  # the limit in flight
        (18, 0, 18, 0, 9, config(), 2),  # the last step (10 updates)
        (18, 1, 19, 0, 9, config(lag=3), 1),
        (20, 0, 23, 3, 9, config(lag=3), 0),  # nothing beyond the last step
        (9, 0, 9, 0, 0, config(), 0),  # never negative
    ],
)
def test_capacity(accepted, in_flight, next_index, refills, version, settings, expected) -> None:
    admitted = may_admit(
        accepted=accepted,
        in_flight=in_flight,
        next_index=next_index,
        refills=refills,
        version=version,
        updates=10,
        config=settings,
    )
    assert admitted == expected


STEPS = [
    # name, waiting, flights, version, config, chosen, dropped, waits for
    ("enough", [entry(1), entry(0)], [], 0, config(), [0, 1], [], ""),
    ("too few", [entry(0)], [flight(1)], 0, config(), [], [], "2 trainable groups: 1 are waiting"),
    (
        "oldest version first",
        [entry(0, 1), entry(1, 0), entry(2, 1)],
        [],
        1,
        config(lag=1),
        [1, 0],
        [],
        "",
    ),
    (
        "would push one in flight beyond",
        [entry(2, 1), entry(3, 1)],
        [flight(0)],
        1,
        config(lag=1),
        [],
        [],
        "group 0 (group-0), in flight since version 0",
    ),
    (
        "one in flight still has time",
        [entry(2, 1), entry(3, 1)],
        [flight(0)],
        1,
        config(lag=2),
        [2, 3],
        [],
        "",
    ),
    (
        "two left for the one step that may take them",
        [entry(3, 1)],
        [flight(0), flight(1)],
        1,
        config(groups=1, lag=2),
        [],
        [],
        "group 0",
    ),
    (
        "in flight and waiting: it has come",
        [entry(0), entry(1)],
        [flight(0)],
        0,
        config(),
        [0, 1],
        [],
        "",
    ),
    (
        "came back too late",
        [entry(0, 0), entry(4, 3), entry(5, 3)],
        [],
        3,
        config(),
        [4, 5],
        [("group-0", "stale: lag 3 > max_lag 0")],
        "",
    ),
    (
        "one too many came back",
        [entry(0), entry(1), entry(2)],
        [],
        0,
        config(),
        [0, 1],
        [("group-2", "surplus: no place left in the steps within max_lag 0")],
        "",
    ),
    (
        "drop does not wait",
        [entry(0, 0), entry(4, 1), entry(5, 1)],
        [flight(1)],
        1,
        config(stale="drop"),
        [4, 5],
        [("group-0", "stale: lag 1 > max_lag 0")],
        "",
    ),
    (
        "train counts",
        [entry(0, 0), entry(4, 1)],
        [flight(1)],
        1,
        config(stale="train"),
        [0, 4],
        [],
        "",
    ),
    (
        "from the future",
        [entry(0, 1, newest=7), entry(4, 5), entry(5, 5)],
        [],
        5,
        config(lag=5, stale="train"),
        [4, 5],
        [("group-0", "future: sampled from version 7, the trainer has 5")],
        "",
    ),
]


@pytest.mark.parametrize("case", STEPS, ids=[case[0] for case in STEPS])
def test_step(case: tuple) -> None:
    _, waiting, flights, version, settings, chosen, dropped, waits_for = case
    choice = choose(waiting, flights, version, settings)
    assert [e.admission_index for e in choice.groups] == chosen
    assert list(choice.dropped) == dropped
    assert choice.wait_for.startswith(waits_for) and bool(choice.wait_for) == (not chosen)
    lags = [version - e.oldest_version for e in choice.groups]
    assert choice.lag_max == max(lags, default=0)
    assert choice.violations == sum(lag > settings.max_lag for lag in lags)


def test_groups_admitted_since_the_flights_were_read_are_left_alone() -> None:
    waiting = [entry(0), entry(1), entry(2)]
    assert choose(waiting, [], 0, config(lag=1), next_index=2).groups == (entry(0), entry(1))
    assert not choose(waiting, [], 0, config(groups=3), next_index=2).groups


def test_usable_leaves_out_what_no_step_will_take() -> None:
    groups = [entry(0, 0), entry(1, 2), entry(2, 3), entry(3, 1, newest=9)]
    assert usable(groups, 3, config(lag=1)) == 2
    assert usable(groups, 3, config(lag=1, stale="train")) == 3
    assert refusal(groups[1], 3, config(lag=1)) == ""


@given(
    lag=st.integers(0, 3),
    groups=st.integers(1, 3),
    version=st.integers(0, 5),
    ages=st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=12),
    stale=st.sampled_from(["wait", "drop", "train"]),
)
def test_a_step_is_full_within_the_bound_and_leaves_room(lag, groups, version, ages, stale) -> None:
    settings = config(groups, lag, stale)
    waiting = [entry(i, age) for i, (age, flies) in enumerate(ages) if not flies]
    flights = [flight(i, age) for i, (age, flies) in enumerate(ages) if flies]
    choice = choose(waiting, flights, version, settings)
    assert bool(choice.groups) != bool(choice.wait_for)
    if not choice.groups:
        assert not choice.dropped
        return
    taken = {e.group_id for e in choice.groups}
    gone = taken | {g for g, _ in choice.dropped}
    assert len(taken) == groups and len(gone) == groups + len(choice.dropped)
    assert all(e.newest_version <= version for e in choice.groups)
    if stale != "train":
        assert choice.lag_max <= lag and choice.violations == 0
    if stale == "wait":
        pending = [e.oldest_version for e in waiting if e.group_id not in gone]
        pending += [f.min_version for f in flights]
        for age in pending:
            places = max(0, age + lag - version) * groups
            assert sum(other <= age for other in pending) <= places
