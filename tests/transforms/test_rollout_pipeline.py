"""The graph on named runners; what the stages decide is tested as functions next door."""

import dataclasses

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.testing import test_pipeline, test_stream

from infra.contracts.errors import InferenceError
from infra.contracts.records import Decision
from infra.ledger.group_index import GroupIndex, GroupState
from infra.shards.shard_index import ShardIndex
from infra.shards.shard_reader import read_shard
from tests.builders import make_task
from tests.transforms.pipeline_parts import Setting, message
from transforms.parse_tasks import ParseTasks
from transforms.rollout_pipeline import RolloutPipeline

HOSTILE = ("\x00\x1b[31m", "\u202e</script>", "1\n" + "{" * 9000, "\\boxed{" * 99, "''';--", "1\n")


def run_bounded(setting, messages, **options):
    with test_pipeline.TestPipeline(runner="FnApiRunner") as pipeline:
        (
            pipeline
            | beam.Create(messages)
            | ParseTasks(setting.settings)
            | RolloutPipeline(setting.settings, **options)
        )


def run_streaming(setting, *pulls):
    options = PipelineOptions(["--streaming", "--runner=BundleBasedDirectRunner"])
    stream = test_stream.TestStream(coder=beam.coders.BytesCoder())
    for messages in pulls:
        stream = stream.add_elements(messages)
    with test_pipeline.TestPipeline(runner="BundleBasedDirectRunner", options=options) as pipeline:
        (
            pipeline
            | stream.advance_watermark_to_infinity()
            | ParseTasks(setting.settings)
            | RolloutPipeline(setting.settings)
        )


def states(setting):
    index = GroupIndex(setting.store)
    index.refresh()
    return index


def groups(setting):
    found = [read_shard(setting.store, m) for m in ShardIndex(setting.store).poll()]
    return {group.group_id: group for shard in found for group in shard}


# The fake answers 1, 2 to every group: of prompts "0 + 1" and "1 + 1" exactly one sample is right.
EXPECTED = {GroupState.WAITING: 2, GroupState.REJECTED: 4}


@pytest.mark.parametrize("run", [run_bounded, run_streaming])
def test_every_task_ends_in_one_state(run):
    setting = Setting()
    tasks = [make_task(i, n=2) for i in range(6)]
    run(setting, [message(*tasks[:4]), message(*tasks[4:])])
    index = states(setting)
    assert index.counts == EXPECTED
    assert {t.group_id for t in tasks} == set(index.states())
    accepted = groups(setting)[tasks[0].group_id]
    assert [j.reward for j in accepted.judgements] == [1.0, 0.0]
    assert [r.response_text for r in accepted.rollouts] == ["1\n", "2\n"]
    assert set(accepted.timings) == {"generate", "score"}
    assert setting.hints["trainer"] == setting.hints["controller"] >= 1


def test_batching_in_front_gives_the_same():
    setting = Setting()
    run_bounded(setting, [message(*(make_task(i, n=2) for i in range(6)))], batch_groups=4)
    assert states(setting).counts == EXPECTED


def test_several_pulls_are_several_shards():
    setting = Setting()
    run_streaming(setting, [message(make_task(0, n=2))], [message(make_task(1, n=2))])
    assert len(ShardIndex(setting.store, (Decision.ACCEPTED,)).poll()) == 2
    assert states(setting).counts == {GroupState.WAITING: 2}


def test_a_task_delivered_twice_counts_once():
    """A re-issue under the same ids, in the same pull and in a later one."""
    setting = Setting()
    task = make_task(0, n=2)
    again = dataclasses.replace(task, attempt=2)
    run_streaming(setting, [message(task), message(again)], [message(again)])
    index = states(setting)
    assert index.counts == {GroupState.WAITING: 1}
    assert index.superseded <= 1


def test_a_dead_letter_is_data():
    def respond(request, index):
        if "2 + 1" in request.messages[0].content:
            raise InferenceError("prompt too long", retryable=False)
        return "1\n2\n".splitlines()[index]

    setting = Setting(respond=respond)
    run_bounded(setting, [message(*(make_task(i, n=2) for i in range(3)))])
    assert states(setting).counts == {GroupState.WAITING: 2, GroupState.FAILED: 1}
    dead = groups(setting)[make_task(2).group_id]
    assert (dead.reason, dead.error) == (
        "generation_failed",
        "InferenceError: prompt too long",
    )


def test_expired_and_broken_messages_are_discarded():
    setting = Setting()
    late = make_task(0, n=2, expires_at=999.0)
    bad = [b"", b"{", b'{"tasks":1}', b'{"tasks":[{}]}', b"[]", b"\xff", b"[" * 100_000]
    run_streaming(setting, [message(late, make_task(1, n=2)), *bad])
    assert states(setting).counts == {GroupState.WAITING: 1}


def test_hostile_text_goes_through():
    setting = Setting(respond=lambda request, i: HOSTILE[i])
    sampling = dataclasses.replace(make_task(n=6).sampling, n=6, max_new_tokens=9999)
    task = make_task(0, sampling=sampling)
    run_bounded(setting, [message(task)])
    assert [r.response_text for r in groups(setting)[task.group_id].rollouts] == list(HOSTILE)
