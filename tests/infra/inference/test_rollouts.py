import dataclasses

import numpy as np
import pytest

from infra.contracts import ids
from infra.contracts.errors import InferenceError
from infra.contracts.json_codec import from_json, to_json
from infra.contracts.records import Decision, Group, SamplingParams
from infra.inference.fake_client import FakeInferenceClient
from infra.inference.rollouts import failed_group, group_of, request_for, rollouts_from_reply
from tests.builders import make_task

TASK = make_task(4, version=2, sampling=SamplingParams(n=2, max_new_tokens=8))
REPLY = FakeInferenceClient(("5\n", "six")).answer(request_for(TASK, 9.0))


def changed(**sample):
    first = dataclasses.replace(REPLY.samples[0], **sample)
    return dataclasses.replace(REPLY, samples=(first, *REPLY.samples[1:]))


def test_the_request_does_not_depend_on_the_attempt():
    again = dataclasses.replace(TASK, attempt=3, expires_at=5.0, epoch=9)
    assert request_for(again, 9.0) == request_for(TASK, 9.0)
    assert request_for(TASK, 9.0).seeds == tuple(ids.sample_seed(TASK.seed, i) for i in (0, 1))


def test_rollouts_are_the_replys_facts():
    first, second = rollouts_from_reply(TASK, REPLY)
    assert (first.response_text, second.response_text) == ("5\n", "six")
    assert first.response_ids.tolist() == [ord("5"), ord("\n")]
    assert first.loss_mask.tolist() == [True, True]
    assert first.behaviour_logprobs.tolist() == [-0.5, -0.5]
    assert first.policy_versions.tolist() == [2, 2]
    assert first.weights == ((2, "fake-2"),)
    assert first.spans == ((0, 2, "model", "stop"),)
    assert first.rollout_id != second.rollout_id
    group = group_of(TASK, (first, second), generate=0.5)
    assert to_json(from_json(Group, to_json(group))) == to_json(group)


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (dataclasses.replace(REPLY, samples=REPLY.samples[:1]), "1 samples, 2 were asked"),
        (dataclasses.replace(REPLY, weights=()), "no weights"),
        (dataclasses.replace(REPLY, weights=((3, "x"),)), "version 2 is not among"),
        (changed(policy_versions=np.array([1, 2], np.int32)), "version 1 is below the 2"),
        (changed(raw_logprobs=np.zeros(3, np.float32)), r"raw_logprobs has shape \(3,\), 2 tokens"),
        (changed(behaviour_logprobs=np.array([0, np.nan], np.float32)), "not finite"),
    ],
)
def test_a_reply_that_breaks_the_protocol_is_refused(reply, says):
    with pytest.raises(InferenceError, match=says) as error:
        rollouts_from_reply(TASK, reply)
    assert not error.value.retryable


def test_text_that_cannot_be_stored_is_made_storable():
    rollout = rollouts_from_reply(TASK, changed(response_text="a\ud800b"))[0]
    assert rollout.response_text == "a?b"


def test_a_dead_letter_says_what_happened():
    dead = failed_group(TASK, "generation_failed", InferenceError("worker\ud800 gone"))
    assert (dead.decision, dead.reason) == (Decision.FAILED, "generation_failed")
    assert dead.error == "InferenceError: worker? gone"
    assert dead.rollouts == ()
    assert to_json(dead)
