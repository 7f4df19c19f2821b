"""Responses in segments: joined by a client, over workers that stop; what must not be joined."""

import dataclasses
import random

import numpy as np
import pytest

from infra.clock import ManualClock
from infra.contracts.errors import InferenceError
from infra.contracts.json_codec import to_json
from infra.contracts.records import FinishReason
from infra.inference.fake_client import FakeInferenceClient
from infra.inference.pooled_client import PooledClient
from infra.inference.segments import Segments
from infra.inference.worker import Busy
from tests.contracts.inference_client_contract import make_request, respond
from tests.infra.inference.scripted_worker import ScriptedWorker


class Stopping(ScriptedWorker):
    """Answers ``tokens`` of its first request and nothing more: it is being stopped."""

    def __init__(self, name, clock, tokens):
        super().__init__(name, ["ok"], clock)
        self.fake, self.tokens, self.asked = FakeInferenceClient(respond=respond), tokens, []

    def attempt(self, request, call):
        self.asked.append(request)
        if len(self.asked) > 1:
            raise Busy("stopping", 1.0)
        return self.fake.answer(dataclasses.replace(request, segment_tokens=self.tokens))


def well(name, clock):
    worker = ScriptedWorker(name, ["ok"], clock)
    worker.fake = FakeInferenceClient(respond=respond)
    return worker


@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
def test_what_a_stopping_worker_has_is_continued_by_the_next(tokens):
    clock, request = ManualClock(), make_request()
    stopping, other = Stopping("stopping", clock, tokens), well("well", clock)
    for seed in range(4):  # either is asked first
        stopping.asked.clear()
        client = PooledClient(
            [stopping, other], clock=clock, jitter=random.Random(seed), segment_tokens=100
        )
        reply = client.submit(request).result()
        client.close()
        assert to_json(reply) == to_json(other.fake.answer(request))


def test_a_whole_pool_is_asked_segment_by_segment():
    clock, request = ManualClock(), make_request()
    workers = [well(str(i), clock) for i in range(3)]
    client = PooledClient(workers, clock=clock, jitter=random.Random(1), segment_tokens=2)
    reply = client.submit(request).result()
    assert [s.finish_reason for s in reply.samples] == ["stop", "length", "stop"]
    asked = [r for worker in workers for r in worker.fake.requests]
    assert sorted(r.request_id for r in asked) == [
        request.request_id + suffix for suffix in ("", "/2", "/3")
    ]
    assert [len(r.seeds) for r in sorted(asked, key=lambda r: r.request_id)] == [3, 2, 1]
    client.close()


def test_a_group_that_asks_for_segments_itself_is_given_them():
    clock = ManualClock()
    client = PooledClient([well("w", clock)], clock=clock, segment_tokens=3)
    reply = client.submit(dataclasses.replace(make_request(), segment_tokens=1)).result()
    assert {s.finish_reason for s in reply.samples} == {FinishReason.SEGMENT}
    client.close()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"dtype": "bfloat16"}, "dtype differ"),
        ({"tokenizer_digest": "other"}, "tokenizer_digest differ"),
        ({"prompt_ids": np.array([1], np.int32)}, "prompt_ids differ"),
        ({"weights": ((0, "another digest of version 0"),)}, "version 0 differ"),
    ],
)
def test_what_does_not_continue_is_refused_and_changes_nothing(changes, says):
    segments, fake = Segments(make_request(), 2), FakeInferenceClient(respond=respond)
    segments.add(fake.answer(segments.next_request()))
    good = fake.answer(segments.next_request())
    with pytest.raises(InferenceError, match=says):
        segments.add(dataclasses.replace(good, **changes))
    segments.add(good)
    empty = dataclasses.replace(
        good.samples[0], **{n: np.zeros(0, np.int32) for n in ("response_ids", "policy_versions")}
    )
    with pytest.raises(InferenceError, match="without a token"):
        segments.add(dataclasses.replace(good, samples=(empty,)))
