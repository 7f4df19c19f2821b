"""What the stages do with groups, as functions."""

import dataclasses

import pytest

from infra.contracts.errors import SchemaMismatch, StorageError
from infra.contracts.json_codec import to_json
from infra.contracts.records import Decision
from infra.contracts.task_message import decode_tasks
from infra.ledger.group_index import GroupIndex, GroupState
from infra.metrics import MetricsReader
from infra.storage.memory_store import MemoryStore
from infra.storage.run_layout import BLOCK_SIZE
from tests.builders import make_group, make_task
from tests.transforms.pipeline_parts import Setting, message
from transforms.coders import GroupCoder, GroupTaskCoder
from transforms.filter_groups import decide
from transforms.generate_rollouts import gather, submit
from transforms.parts import parts_of
from transforms.score_rollouts import score
from transforms.write_shards import commit


def through(setting, task):
    """One task through every stage's function."""
    future = submit(task, setting.parts, 60.0)
    group = gather(task, future, setting.clock.now(), setting.parts)
    return decide(score(group, setting.parts), setting.parts)


def test_a_message_decodes_to_its_tasks():
    tasks = (make_task(0), make_task(1))
    assert decode_tasks(message(*tasks)) == tasks
    for bad in (b"{}", b'{"tasks":[],"more":1}', message(make_task()).replace(b"attempt", b"x")):
        with pytest.raises(SchemaMismatch):
            decode_tasks(bad)


def test_text_that_cannot_be_stored_is_refused_at_the_door():
    bad = message(make_task()).replace(b"+ 1 =", b"\\ud800")
    with pytest.raises(SchemaMismatch):
        decode_tasks(bad)


def test_the_lease_bounds_the_request():
    setting = Setting()
    submit(make_task(expires_at=1010.0), setting.parts, 60.0)
    submit(make_task(expires_at=9999.0), setting.parts, 60.0)
    assert [r.timeout_secs for r in setting.client.requests] == [10.0, 60.0]


def test_while_stopping_an_unfinished_group_is_left_to_its_lease():
    setting = Setting()
    setting.parts.stop()
    task = make_task()
    assert gather(task, submit(task, setting.parts, 60.0), 0.0, setting.parts) is None


def test_shards_are_cut_by_decision_block_and_count():
    setting = Setting()
    tasks = [make_task(i, n=2) for i in (0, 1, 2, 3, BLOCK_SIZE)]
    manifests = commit([through(setting, t) for t in tasks], setting.parts, limit=1)
    assert len(manifests) == 5
    assert {m.block for m in manifests} == {0, 1}
    assert setting.hints == {"trainer": 1, "controller": 1}


def test_nothing_to_write_sends_no_hint():
    setting = Setting()
    assert commit([], setting.parts, limit=4) == []
    assert not setting.hints


class FailingStore(MemoryStore):
    """Fails once, before or after the k-th creation: a crash between any two writes."""

    def __init__(self, at, after):
        super().__init__()
        self.left, self.after = at, after

    def create(self, key, data):
        self.left -= 1
        if self.left == 0 and not self.after:
            raise StorageError("killed")
        made = super().create(key, data)
        if self.left == 0:
            raise StorageError("killed")
        return made


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_a_bundle_retried_after_any_crash_leaves_each_group_in_one_state(at, after):
    setting = Setting(store=FailingStore(at, after))
    tasks = [make_task(i, n=2) for i in range(4)]
    decided = [through(setting, task) for task in tasks]
    with pytest.raises(StorageError):
        commit(decided, setting.parts, limit=64)
    # The retry may meet other weights: the second copy then differs from the first.
    setting.client.version = 1
    for groups in (decided, [through(setting, task) for task in tasks]):
        commit(groups, setting.parts, limit=64)
    index = GroupIndex(setting.store)
    index.refresh()
    assert index.counts == {GroupState.WAITING: 2, GroupState.REJECTED: 2}
    assert set(index.states()) == {task.group_id for task in tasks}


def test_metrics_count_what_happened():
    setting = Setting()
    commit([through(setting, make_task(i, n=2)) for i in range(3)], setting.parts, limit=64)
    setting.parts.metrics.flush()
    (row,) = MetricsReader(setting.store, "rollouts-0").poll()
    assert row["pipeline/generate/rollouts"]["sum"] == 6
    assert row["pipeline/score/verdict_pass"]["sum"] == 2
    assert row["pipeline/filter/rollouts"]["count"] == 2
    assert row["pipeline/filter/reason_zero_variance"]["count"] == 1
    assert row["pipeline/write/shard_groups"]["sum"] == 3


def test_coders_round_trip():
    group, task = make_group(3), make_task(3)
    coder = GroupCoder()
    assert to_json(coder.decode(coder.encode(group))) == to_json(group)
    assert GroupTaskCoder().decode(GroupTaskCoder().encode(task)) == task


def test_parts_are_kept_by_the_settings_content():
    setting = Setting()
    assert parts_of(dataclasses.replace(setting.settings)) is setting.parts
    other = dataclasses.replace(setting.settings, flush_groups=1)
    assert other.key != setting.settings.key


def test_failed_groups_pass_score_and_filter():
    setting = Setting()
    failed = make_group(decision=Decision.FAILED, recipe_digest=setting.parts.recipe.digest)
    assert decide(score(failed, setting.parts), setting.parts).error == failed.error
