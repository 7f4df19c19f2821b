"""The audit: the identity on sound runs, and every kind of unsoundness named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from infra.contracts.errors import ConfigError
from infra.contracts.json_codec import to_json
from infra.contracts.manifests import ControlState, Flight, LedgerEntry
from infra.contracts.records import Decision
from infra.ledger import command, ledger
from infra.ledger.audit import audit
from infra.shards.shard_writer import write_shard
from infra.storage import run_layout
from infra.storage.local_store import LocalStore
from infra.storage.memory_store import MemoryStore
from infra.storage.object_store import ObjectStore
from tests.builders import RECIPE, make_group, make_group_id


def admit(store: ObjectStore, count: int, *in_flight: int, reissued: int = 0) -> None:
    flights = tuple(
        Flight(
            admission_index=i,
            group_id=make_group_id(i),
            min_version=0,
            attempt=1,
            leased_until=1.0,
        )
        for i in in_flight
    )
    state = ControlState(run="test", epoch=1, next_index=count, flights=flights, reissued=reissued)
    old = store.read_with_token(run_layout.CONTROL_STATE)
    token = old[1] if old else None
    assert store.compare_and_swap(run_layout.CONTROL_STATE, to_json(state), token)


def commit(store: ObjectStore, *indices: int, decision: Decision = Decision.ACCEPTED, attempt=1):
    groups = [make_group(i, decision=decision, attempt=attempt) for i in indices]
    return write_shard(store, groups, recipe_digest=RECIPE, now=0.0)


def step(store: ObjectStore, number: int, *consumed: tuple[int, str], dropped=(), lag: int = 0):
    entry = LedgerEntry(
        step=number,
        groups=tuple((make_group_id(i), digest) for i, digest in consumed),
        dropped=tuple((make_group_id(i), "stale") for i in dropped),
        lag_max=lag,
        incarnation="one",
        settings_digest="s",
        created_at=0.0,
    )
    assert ledger.append(store, entry)


def a_run(store: ObjectStore) -> None:
    """Ten admitted: two trained, one rejected, one failed, one dropped, two waiting, three fly."""
    admit(store, 10, 1, 7, 8, 9, reissued=4)
    shard = commit(store, 0, 1, 2)
    commit(store, 3, 4)
    commit(store, 5, decision=Decision.REJECTED)
    commit(store, 6, decision=Decision.FAILED)
    commit(store, 3, decision=Decision.FAILED)
    step(store, 1, (0, shard.data_digest), lag=1)
    step(store, 2, (1, shard.data_digest), dropped=(2,))


def test_every_admitted_group_is_in_one_place() -> None:
    store = MemoryStore()
    a_run(store)
    assert audit(store).numbers() == {
        "admitted": 10,
        "trained": 2,
        "rejected": 1,
        "failed": 1,
        "dropped": 1,
        "waiting": 2,
        "in_flight": 3,
        "lost": 0,
        "twice": 0,
        "superseded": 1,
        "reissued": 4,
        "max_lag_seen": 1,
    }
    assert audit(store).holds


def test_a_run_that_has_not_begun_is_sound() -> None:
    result = audit(MemoryStore())
    assert result.holds and set(result.numbers().values()) == {0}


def test_an_admitted_group_without_record_or_flight_is_lost() -> None:
    store = MemoryStore()
    admit(store, 4, 1)
    commit(store, 3)
    result = audit(store)
    assert (result.lost, result.lost_indices, result.holds) == (2, (0, 2), False)
    assert result.admitted == result.accounted


def test_a_group_that_two_steps_consumed_is_named() -> None:
    store = MemoryStore()
    admit(store, 2)
    shard = commit(store, 0, 1).data_digest
    step(store, 1, (0, shard), (1, shard))
    step(store, 2, (1, shard))
    result = audit(store)
    assert (result.twice, result.twice_groups) == (1, (make_group_id(1),))
    assert not result.holds and result.lost == 0


def test_one_step_that_names_a_group_twice_is_found() -> None:
    store = MemoryStore()
    admit(store, 1)
    shard = commit(store, 0).data_digest
    step(store, 1, (0, shard), (0, shard))
    assert audit(store).twice == 1


def test_a_group_that_was_never_admitted_is_named() -> None:
    store = MemoryStore()
    admit(store, 1)
    commit(store, 0, 5)
    result = audit(store)
    assert result.unplaced_groups == (make_group_id(5),) and not result.holds


def test_a_trained_group_whose_shard_is_gone_is_named() -> None:
    store = MemoryStore()
    admit(store, 1)
    step(store, 1, (0, "no such shard"))
    result = audit(store)
    assert result.unplaced_groups == (make_group_id(0),)
    assert result.lost_indices == (0,) and not result.holds


class MovingStore(MemoryStore):
    """A run that goes on while it is audited: before each listing one more group is admitted."""

    admitted = 2

    def list_after(self, prefix: str, after: str = "", limit: int = 1000) -> list[str]:
        if prefix.startswith("rollouts/") and self.admitted < 6:
            self.admitted += 1
            admit(self, self.admitted, *range(self.admitted))
            commit(self, self.admitted - 1)
        return super().list_after(prefix, after, limit)


def test_a_running_run_is_never_reported_as_unsound() -> None:
    store = MovingStore()
    admit(store, 2, 0, 1)
    commit(store, 0)
    result = audit(store)
    assert result.holds
    assert (result.admitted, result.waiting, result.in_flight) == (2, 1, 1)


def test_the_command_says_what_is_what(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a_run(LocalStore(tmp_path))
    assert command.main([str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "in_flight           3" in shown and shown.endswith("sound\n")
    assert command.main([str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["holds"] is True and told["waiting"] == 2


def test_the_command_names_what_is_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = LocalStore(tmp_path)
    admit(store, 30)
    shard = commit(store, 0).data_digest
    step(store, 1, (0, shard))
    step(store, 2, (0, shard))
    assert command.main([str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert "lost admission indices: 1 2 3" in shown and "and 9 more" in shown
    assert f"groups consumed twice: {make_group_id(0)}" in shown
    assert shown.endswith("NOT SOUND\n")


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no run"):
        command.main([str(tmp_path / "demo")])
