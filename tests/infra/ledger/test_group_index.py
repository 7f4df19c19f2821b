"""The group index against a brute-force model, and the rules one by one."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.contracts.errors import StorageError
from infra.contracts.manifests import LedgerEntry, ShardManifest
from infra.contracts.records import Decision
from infra.ledger import ledger
from infra.ledger.group_index import GroupIndex, GroupState
from infra.shards.quarantine import quarantine
from infra.shards.shard_writer import write_shard
from infra.storage.memory_store import MemoryStore
from tests.builders import RECIPE, make_group, make_group_id

ACCEPTED, REJECTED, FAILED = Decision


@dataclass
class Run:
    """A run written by hand: commits and ledger lines in any order."""

    store: MemoryStore = field(default_factory=MemoryStore)
    steps: int = 0

    def commit(self, *indices: int, decision: Decision = ACCEPTED, attempt: int = 1):
        """Another attempt is another copy: a shard with another digest."""
        groups = [make_group(i, decision=decision, attempt=attempt) for i in indices]
        return write_shard(self.store, groups, recipe_digest=RECIPE, now=0.0)

    def step(self, *consumed: tuple[int, ShardManifest], dropped: tuple[int, ...] = ()) -> None:
        self.steps += 1
        line = LedgerEntry(
            step=self.steps,
            groups=tuple((make_group_id(i), m.data_digest) for i, m in consumed),
            dropped=tuple((make_group_id(i), "stale") for i in dropped),
            lag_max=self.steps % 3,
            incarnation="one",
            settings_digest="s",
            created_at=0.0,
        )
        assert ledger.append(self.store, line)


def refreshed(run: Run) -> GroupIndex:
    index = GroupIndex(run.store)
    index.refresh()
    return index


def test_an_empty_run_has_nothing() -> None:
    index = GroupIndex(MemoryStore())
    assert not index.refresh()
    assert index.waiting == {} and index.last_step == 0 and index.superseded == 0
    assert index.state_of("unknown") is None and index.copy_of("unknown") is None


@pytest.mark.parametrize(
    ("decision", "state"),
    [
        (ACCEPTED, GroupState.WAITING),
        (REJECTED, GroupState.REJECTED),
        (FAILED, GroupState.FAILED),
    ],
)
def test_the_decision_is_the_state_before_the_ledger(decision: Decision, state: GroupState) -> None:
    run = Run()
    run.commit(4, decision=decision)
    index = refreshed(run)
    assert index.state_of(make_group_id(4)) is state
    assert index.counts[state] == 1
    assert list(index.waiting) == ([make_group_id(4)] if decision is ACCEPTED else [])


def test_before_the_ledger_rollouts_beat_rejects_beat_failures() -> None:
    run = Run()
    for decision, state in [
        (FAILED, GroupState.FAILED),
        (REJECTED, GroupState.REJECTED),
        (ACCEPTED, GroupState.WAITING),
    ]:
        run.commit(0, decision=decision)
        assert refreshed(run).state_of(make_group_id(0)) is state
    assert refreshed(run).superseded == 2


def test_among_rollouts_the_lowest_shard_digest_wins_until_the_ledger_names_one() -> None:
    run = Run()
    copies = sorted(
        (run.commit(0, attempt=attempt) for attempt in (1, 2, 3)), key=lambda m: m.data_digest
    )
    index = refreshed(run)
    assert index.waiting[make_group_id(0)].manifest == copies[0]
    run.step((0, copies[2]))
    assert index.refresh()
    assert index.state_of(make_group_id(0)) is GroupState.TRAINED
    assert index.copy_of(make_group_id(0)).manifest == copies[2]
    assert index.waiting == {} and index.superseded == 2


def test_a_copy_that_comes_after_training_changes_nothing() -> None:
    run = Run()
    run.step((0, run.commit(0)))
    index = refreshed(run)
    run.commit(0, attempt=2)
    index.refresh()
    assert index.state_of(make_group_id(0)) is GroupState.TRAINED
    assert index.superseded == 1 and index.waiting == {}


def test_a_dropped_group_stays_dropped() -> None:
    run = Run()
    run.commit(0, 1)
    run.step(dropped=(1,))
    run.commit(1, attempt=2)
    index = refreshed(run)
    assert index.state_of(make_group_id(1)) is GroupState.DROPPED
    assert list(index.waiting) == [make_group_id(0)]


def test_a_quarantined_copy_is_a_failure_unless_there_is_another() -> None:
    run = Run()
    bad = run.commit(0, 1)
    index = refreshed(run)
    quarantine(run.store, bad.data_key, "a flipped bit")
    assert index.refresh()
    assert index.state_of(make_group_id(0)) is GroupState.FAILED
    assert index.waiting == {}
    other = run.commit(0, attempt=2)
    index.refresh()
    assert index.waiting[make_group_id(0)].manifest == other
    assert index.state_of(make_group_id(1)) is GroupState.FAILED


def test_a_group_that_two_steps_consumed_is_known() -> None:
    run = Run()
    shard = run.commit(0)
    run.step((0, shard))
    run.step((0, shard))
    assert refreshed(run).steps_of(make_group_id(0)) == (1, 2)


def test_nothing_new_is_nothing() -> None:
    run = Run()
    run.step((0, run.commit(0)))
    index = refreshed(run)
    assert not index.refresh()


class FlakyStore(MemoryStore):
    failing = False

    def read(self, key: str) -> bytes:
        if self.failing and key.startswith("ledger/"):
            raise StorageError(f"{key}: a hiccup")
        return super().read(key)


def test_an_error_between_manifests_and_ledger_loses_nothing() -> None:
    run = Run(store=FlakyStore())
    run.step((0, run.commit(0)))
    index = refreshed(run)
    run.commit(1)
    run.store.failing = True
    with pytest.raises(StorageError):
        index.refresh()
    run.store.failing = False
    assert index.refresh()
    assert list(index.waiting) == [make_group_id(1)]


def test_blocks_whose_groups_have_all_ended_are_not_polled() -> None:
    run = Run()
    for start in range(0, 1024, 256):
        run.commit(*range(start, start + 256), decision=FAILED)
    index = refreshed(run)
    assert index.counts[GroupState.FAILED] == 1024
    late = run.commit(0)
    assert not index.refresh(), "block 0 is closed"
    assert refreshed(run).waiting[make_group_id(0)].manifest == late
    run.commit(1024)
    assert index.refresh()


INDICES = st.integers(0, 5)
OPERATIONS = st.one_of(
    st.tuples(
        st.just("commit"),
        st.lists(INDICES, min_size=1, max_size=3, unique=True),
        st.sampled_from(Decision),
        st.integers(1, 3),
    ),
    st.tuples(st.just("step"), st.lists(INDICES, max_size=2), st.lists(INDICES, max_size=1)),
    st.tuples(st.just("quarantine"), st.integers(0, 9)),
    st.tuples(st.just("refresh")),
)


def model(run: Run, shards: list[ShardManifest], damaged: set[str], index: int):
    """State and number of superseded copies of a group, from everything there is."""
    group_id = make_group_id(index)
    copies = [s for s in shards if group_id in {entry.group_id for entry in s.groups}]
    lines = ledger.entries_after(run.store, 0)
    named = [digest for line in lines for gid, digest in line.groups if gid == group_id]
    if named:
        return GroupState.TRAINED, len([s for s in copies if s.data_digest != named[0]])
    state = None
    for decision, its_state in zip(
        (FAILED, REJECTED, ACCEPTED),
        (GroupState.FAILED, GroupState.REJECTED, GroupState.WAITING),
        strict=True,
    ):
        if any(s.decision is decision and s.data_key not in damaged for s in copies):
            state = its_state
    if state is None and copies:
        state = GroupState.FAILED
    if any(gid == group_id for line in lines for gid, _ in line.dropped):
        state = GroupState.DROPPED
    return state, max(len(copies) - 1, 0)


@settings(max_examples=40, deadline=None)
@given(st.lists(OPERATIONS, max_size=14))
def test_any_interleaving_gives_the_state_of_the_model(operations: list[tuple]) -> None:
    run, shards, damaged = Run(), {}, set()
    index = GroupIndex(run.store)
    for kind, *arguments in operations:
        if kind == "commit":
            indices, decision, attempt = arguments
            shard = run.commit(*indices, decision=decision, attempt=attempt)
            shards[shard.data_key] = shard
        elif kind == "step":
            consumed, dropped = arguments
            copies = [(i, s) for i in consumed for s in shards.values() if holds(s, i)][:2]
            run.step(*copies, dropped=tuple(dropped))
        elif kind == "quarantine" and shards:
            key = sorted(shards)[arguments[0] % len(shards)]
            quarantine(run.store, key, "damaged")
            damaged.add(key)
        elif kind == "refresh":
            index.refresh()
    index.refresh()
    expected = {i: model(run, list(shards.values()), damaged, i) for i in range(6)}
    for followed in (index, refreshed(run)):
        states = {i: followed.state_of(make_group_id(i)) for i in range(6)}
        assert states == {i: state for i, (state, _) in expected.items()}
        assert followed.superseded == sum(extra for _, extra in expected.values())
        assert +followed.counts == Counter(s for s, _ in expected.values() if s is not None)
        waiting = {make_group_id(i) for i, s in states.items() if s is GroupState.WAITING}
        assert set(followed.waiting) == waiting
        for group_id, copy in followed.waiting.items():
            healthy = [
                s.data_digest
                for s in shards.values()
                if s.decision is ACCEPTED
                and s.data_key not in damaged
                and group_id in {entry.group_id for entry in s.groups}
            ]
            assert copy.manifest.data_digest == min(healthy)
            assert copy.entry.group_id == group_id


def holds(shard: ShardManifest, index: int) -> bool:
    return any(entry.admission_index == index for entry in shard.groups)


def test_the_entry_is_the_groups_own() -> None:
    run = Run()
    run.commit(3, 1)
    index = refreshed(run)
    assert index.waiting[make_group_id(3)].entry.admission_index == 3
    assert replace(index.waiting[make_group_id(3)].entry) == index.copy_of(make_group_id(3)).entry
