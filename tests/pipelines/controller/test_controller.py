"""The controller's shell against real storage: order of writes, restarts, fencing, commands."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from infra.contracts.errors import ConfigError, DamagedObject
from infra.contracts.records import Decision
from infra.heartbeats import read_heartbeats
from infra.ledger.audit import audit
from infra.ledger.group_index import GroupIndex
from infra.metrics import MetricsReader
from infra.shards.shard_reader import read_shard
from infra.storage import run_layout
from infra.storage.local_store import LocalStore
from infra.storage.memory_store import MemoryStore
from pipelines.controller.broker import subscription
from pipelines.controller.controller import run_until_done, split_messages
from tests.builders import make_prompt, make_task
from tests.pipelines.controller.rig import LEASE_SECS, Rig, make_prompts

ACCEPTED, REJECTED, FAILED = Decision.ACCEPTED, Decision.REJECTED, Decision.FAILED


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("place", ["memory", "folder"])
def test_a_whole_run(lag: int, place: str, tmp_path: Path) -> None:
    """Every fifth group is rejected, every seventh fails; three updates come about all the same."""
    store = MemoryStore() if place == "memory" else LocalStore(str(tmp_path))
    rig = Rig(lag=lag, store=store)
    controller = rig.started()
    assert not controller.turn() and not rig.take()  # no version yet
    rig.publish_version(0)
    for _ in range(50):
        if controller.turn():
            break
        for task in rig.take():
            index = task.admission_index
            decision = REJECTED if index % 5 == 2 else FAILED if index % 7 == 3 else ACCEPTED
            rig.commit(task, decision)
        rig.train()
    assert rig.done_word() == {"reason": "updates_reached", "version": 3}
    found = audit(rig.store)
    assert found.holds and (found.trained, found.in_flight, found.waiting) == (6, 0, 0)
    assert found.max_lag_seen <= lag and (found.rejected, found.failed) == (2, 1)
    assert controller.state.refills == 3
    beat = read_heartbeats(rig.store)["controller"]
    assert (beat["state"], beat["admitted"], beat["version"]) == ("draining", 9, 3)
    controller._parts.metrics.flush()
    rows = MetricsReader(rig.store, "controller").poll()
    assert rows[-1]["controller/admission/admitted_groups"] == 9


def test_tasks_say_what_was_admitted() -> None:
    rig = Rig()
    rig.publish_version(0)
    rig.started().turn()
    first, second = rig.take()
    sampling = rig.config().sampling
    expected = make_task(0, sampling=sampling, expires_at=rig.clock.now() + LEASE_SECS)
    assert first == expected
    assert second.admission_index == 1 and second.prompt == make_prompt(1)


def test_a_dead_pipelines_groups_are_published_again_at_once() -> None:
    rig = Rig()
    rig.publish_version(0)
    controller = rig.started()
    controller.turn()
    first = rig.queue.pull(subscription(0), rig.clock.now(), 0.0).tasks
    second = rig.queue.pull(subscription(1), rig.clock.now(), 0.0).tasks
    assert (len(first), len(second)) == (1, 1)
    controller.turn([subscription(1)])
    (again,) = rig.take(0)
    assert again == replace(second[0], attempt=2) and controller.state.reissued == 1


def test_a_committed_group_of_a_dead_pipeline_is_not_published_again() -> None:
    rig = Rig()
    rig.publish_version(0)
    controller = rig.started()
    controller.turn()
    for task in rig.take(1):
        rig.commit(task, ACCEPTED)
    controller.turn([subscription(1)])
    assert not rig.take() and controller.state.reissued == 0


def test_out_of_attempts_a_group_goes_to_failures() -> None:
    rig = Rig()
    rig.publish_version(0)
    controller = rig.started()
    controller.turn()
    for attempt in (1, 2):
        assert {t.attempt for t in rig.take()} == {attempt}
        rig.clock.advance(LEASE_SECS)
        controller.turn()
    assert {f.admission_index for f in controller.state.flights} == {0, 1}  # till it is seen
    controller.turn()
    index = GroupIndex(rig.store)
    index.refresh()
    copy = index.copy_of(make_task(0).group_id)
    (group,) = read_shard(rig.store, copy.manifest)
    assert (group.decision, group.reason, group.attempt) == (FAILED, "lease_expired", 2)
    assert group.error == "controller: no result after 2 attempts, each of at most 60 s"
    assert [t.admission_index for t in rig.take()] == [2, 3]
    assert audit(rig.store).holds


def test_a_group_nobody_has_taken_yet_keeps_its_attempt() -> None:
    rig = Rig()
    rig.publish_version(0)
    controller = rig.started()
    controller.turn()
    for _ in range(5):  # pipelines take minutes to start
        rig.clock.advance(LEASE_SECS)
        controller.turn()
    assert [(t.admission_index, t.attempt) for t in rig.take()] == [(0, 1), (1, 1)]
    assert controller.state.reissued == 0


def test_drain_ends_when_nothing_is_in_flight() -> None:
    rig = Rig()
    rig.publish_version(0)
    controller = rig.started()
    controller.turn()
    rig.store.create(run_layout.command("drain"), b"{}")
    assert not controller.turn()
    for task in rig.take():
        rig.commit(task, ACCEPTED)
    assert controller.turn() and rig.done_word() == {"reason": "drained", "version": 0}
    rig.store.delete(run_layout.command("drain"))
    again = rig.started()  # resumed: the word of the last session is gone
    assert rig.store.read_with_token(run_layout.CONTROL_DONE) is None and not again.turn()


def test_pause_and_retire() -> None:
    rig = Rig()
    rig.publish_version(0)
    rig.store.create(run_layout.command("pause"), b"{}")
    ids = [rig.prompts.train_ids[0]]
    rig.store.create(run_layout.command("retire"), json.dumps({"prompts": ids}).encode())
    controller = rig.started()
    controller.turn()
    assert not rig.take() and controller.state.paused
    rig.store.delete(run_layout.command("pause"))
    controller.turn()
    assert [t.prompt for t in rig.take()] == [make_prompt(1), make_prompt(2)]
    assert controller.state.retired == {ids[0]: 0}


def test_a_broken_retire_command() -> None:
    rig = Rig()
    controller = rig.started()
    rig.store.create(run_layout.command("retire"), b"[1]")
    with pytest.raises(DamagedObject, match=r"retire\.json: expected .*mend or delete"):
        controller.turn()


def test_held_out_prompts_are_denied_and_epochs_go_on() -> None:
    rig = Rig(prompts=make_prompts(10, held_out=0.5), updates=40, max_in_flight=100)
    rig.publish_version(0)
    controller = rig.started()
    train, held_out = len(rig.prompts.train), rig.prompts.held_out_ids
    assert 0 < train < 10
    seen: list[str] = []
    for version in range(1, 10):
        controller.turn()
        seen += [task.prompt_id for task in rig.take()]
        rig.publish_version(version)
    assert seen[:train] == list(rig.prompts.train_ids) == seen[train : 2 * train]
    assert not held_out & set(seen)


def test_prompts_that_run_out_end_the_run() -> None:
    rig = Rig(prompts=make_prompts(3), epochs=1)
    rig.publish_version(0)
    controller = rig.started()
    for _ in range(10):
        if controller.turn():
            break
        for task in rig.take():
            rig.commit(task, ACCEPTED)
        rig.train()
    assert rig.done_word() == {"reason": "prompts_exhausted", "version": 1}
    assert audit(rig.store).waiting == 1


def test_a_run_of_other_prompts_or_another_name_is_refused() -> None:
    rig = Rig()
    rig.started()
    with pytest.raises(ConfigError, match="begun with other training prompts"):
        replace(rig, prompts=make_prompts(21)).started()
    with pytest.raises(ConfigError, match="holds run 'test', not 'other'"):
        replace(rig, run="other").started()


@pytest.mark.parametrize(
    ("count", "groups", "processes", "sizes"),
    [
        (0, 12, 2, []),
        (12, 12, 2, [6, 6]),
        (24, 12, 2, [6, 6, 6, 6]),
        (3, 12, 2, [2, 1]),
        (1, 12, 2, [1]),
        (5, 5, 2, [3, 2]),
        (2, 1, 4, [1, 1]),
    ],
)
def test_messages_are_shared_out(count, groups, processes, sizes) -> None:
    tasks = tuple(make_task(i) for i in range(count))
    messages = split_messages(tasks, processes=processes, groups_per_step=groups)
    assert [len(m) for m in messages] == sizes
    assert tuple(task for message in messages for task in message) == tasks


def test_hints_of_dead_pipelines_reach_the_next_pass() -> None:
    rig = Rig()
    rig.publish_version(0)
    controller = rig.started()
    hints = iter([[{}, {"version": 0}], [{"dead_subscription": 1}], [], []])
    attempts: list[int] = []

    def next_hints(_timeout_secs: float) -> list[dict]:
        attempts.extend(task.attempt for task in rig.take(1))
        return next(hints)

    stops = iter([False, False, False, True])
    over = run_until_done(controller, next_hints, subscription, lambda: next(stops))
    assert not over and attempts == [1, 1, 2, 2]
