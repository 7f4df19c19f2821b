"""What every inference client must keep. ``client`` answers as ``FakeInferenceClient(ANSWERS)``."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import pytest

from infra.contracts.errors import InferenceError
from infra.contracts.json_codec import to_json
from infra.contracts.records import GenerateRequest, SamplingParams
from infra.inference.capabilities import VersionMeaning, untrainable
from infra.inference.fake_client import FakeInferenceClient
from infra.inference.rollouts import request_for, rollouts_from_reply
from infra.inference.segments import Segments
from tests.builders import make_task

ANSWERS = ("7\n", "seven, or so it seems", "\u00e9\U0001f600\x00")
REFUSED = "refuse me"


def respond(request: GenerateRequest, index: int) -> str:
    if any(REFUSED in message.content for message in request.messages):
        raise InferenceError("refused: no", retryable=False)
    return ANSWERS[index % len(ANSWERS)]


def make_request(index: int = 0, *, n: int = 3, version: int = 0) -> GenerateRequest:
    sampling = SamplingParams(n=n, max_new_tokens=5, stop=("\n",))
    return request_for(make_task(index, version=version, sampling=sampling), timeout_secs=20.0)


class InferenceClientContract:
    """Subclass and give a ``client`` fixture over ``FakeInferenceClient(respond=respond)``."""

    version = 0
    """The policy version that the endpoint serves before it is asked for a newer one."""

    def test_the_reply_is_the_hand_made_one(self, client):
        request = make_request()
        reply = client.submit(request).result()
        fake = FakeInferenceClient(respond=respond, version=self.version).answer(request)
        if client.capabilities.versions is not VersionMeaning.PER_TOKEN:
            # A foreign engine names itself and its weights as it likes.
            names = ("weights", "engine", "dtype", "tokenizer_digest")
            fake = dataclasses.replace(fake, **{name: getattr(reply, name) for name in names})
        assert to_json(reply) == to_json(fake)
        assert [s.response_text for s in reply.samples] == ["7\n", "seven", "\u00e9\U0001f600\x00"]
        assert [s.finish_reason for s in reply.samples] == ["stop", "length", "stop"]

    def test_many_at_once_each_get_their_own(self, client):
        requests = [make_request(i, n=i % 5 + 1) for i in range(40)]
        with ThreadPoolExecutor(4) as pool:
            futures = list(pool.map(client.submit, requests))
        for request, future in zip(requests, futures, strict=True):
            reply = future.result()
            assert reply.request_id == request.request_id
            assert len(reply.samples) == request.sampling.n

    def test_a_repeat_gives_the_same_rollouts(self, client):
        sampling = make_request().sampling
        task = make_task(3, sampling=sampling)
        replies = [client.submit(request_for(task, 20.0)).result() for _ in range(2)]
        first, second = (
            [r.rollout_id for r in rollouts_from_reply(task, reply)] for reply in replies
        )
        assert first == second

    def test_no_reply_is_older_than_asked(self, client):
        reply = client.submit(make_request(version=4)).result()
        assert reply.weights[0][0] >= 4

    def test_a_refused_request_is_a_typed_error(self, client):
        message = dataclasses.replace(make_request().messages[0], content=REFUSED)
        future = client.submit(dataclasses.replace(make_request(), messages=(message,)))
        with pytest.raises(InferenceError, match="refused") as error:
            future.result()
        assert not error.value.retryable

    def test_everything_is_given_back(self, client):
        futures = [client.submit(make_request(i)) for i in range(8)]
        for future in futures:
            future.result()
        in_flight = [v for k, v in client.counters().items() if k.endswith("in_flight_samples")]
        assert not any(in_flight)

    def test_the_default_sampling_can_be_trained_on(self, client):
        assert not untrainable(client.capabilities, make_request().sampling)

    def test_segments_join_to_the_whole(self, client):
        if not client.capabilities.segments:
            return
        request = make_request()
        segments, asked = Segments(request, 2), 0
        while not segments.done:
            segments.add(client.submit(segments.next_request()).result())
            asked += 1
        assert to_json(segments.reply()) == to_json(client.submit(request).result())
        assert asked == 3  # five tokens, two at a time

    def test_a_closed_client_takes_nothing(self, client):
        client.close()
        with pytest.raises(InferenceError, match="closed"):
            client.submit(make_request())
