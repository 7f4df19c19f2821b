"""Whatever is sent, the answer is HTTP with a reason, and the next good request is answered."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.contracts.json_codec import to_json
from infra.contracts.records import GenerateRequest, Message, SamplingParams
from tests.trainer.inference_worker.served_worker import Served

PAGES = ("/generate", "/v1/generate", "/v1/completions", "/v1/chat/completions")
NATIVE = json.loads(
    to_json(
        GenerateRequest(
            request_id="r",
            messages=(Message(role="text", content="ok"),),
            sampling=SamplingParams(n=1, max_new_tokens=2),
            seeds=(1,),
            min_version=0,
            timeout_secs=5.0,
        )
    )
)
GOOD = {
    "/generate": NATIVE,
    "/v1/generate": NATIVE,
    "/v1/completions": {"prompt": "ok", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "ok"}], "max_tokens": 2},
}
MEMBERS = sorted(
    {"prompt", "messages", "model", "n", "seed", "seeds", "max_tokens", "temperature", "top_p"}
    | {"top_k", "stop", "logprobs", "stream", "stream_options", "tools", "sampling", "request_id"}
    | {"min_version", "timeout_secs", "return_token_ids", "response_format", "user"}
)


@pytest.fixture(scope="module")
def served():
    with Served() as served:
        yield served


numbers = st.one_of(
    st.integers(),
    st.integers(2**31 - 2, 2**31 + 2),
    st.integers(2**63, 2**80),
    st.floats(),
    st.just(10**400),
)
leaves = st.one_of(st.none(), st.booleans(), numbers, st.text(max_size=8), st.just("\ud800"))
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", *MEMBERS]), inner)
    ),
    max_leaves=8,
)


def check(served, page, body):
    status, _, answer = served.ask(page, body)
    if status != 200:
        assert status in (400, 411, 413, 422, 404, 503), answer
        reason = answer["error"]
        assert reason["message"] if isinstance(reason, dict) else reason
        assert status != 503 or "no answer within" in str(reason)  # min_version in the future
    assert served.ask(page, GOOD[page])[0] == 200


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(PAGES), st.dictionaries(st.sampled_from(MEMBERS), values, max_size=3))
def test_good_requests_with_members_replaced(served, page, changes):
    # Deadlines stay short: a request may well ask for a version that never comes.
    body = {**GOOD[page], "timeout_secs": 0.05, **changes}
    secs = body["timeout_secs"]
    if secs is None or (isinstance(secs, int | float) and secs > 0.05):
        body["timeout_secs"] = 0.05
    check(served, page, json.dumps(body).encode())


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(PAGES), st.one_of(st.binary(max_size=60), values.map(json.dumps)))
def test_bodies_of_any_kind(served, page, body):
    check(served, page, body if isinstance(body, bytes) else body.encode())


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize(
    "body",
    [
        b"[" * 200_000,
        b'{"a":' * 100_000,
        b"9" * 100_000,
        b"\xff\xfe{}",
        b'{"prompt": "\xc3"}',
        b'{"prompt": [' + b"1," * 100_000 + b"1]}",
        b'{"messages": [' + b'{"role":"user","content":"a"},' * 20_000 + b"1]}",
        b'{"stop": ["' + b"a" * 1_000_000 + b'"], "prompt": "ok"}',
        b'{"n": 1e400, "prompt": "ok"}',
        b'{"temperature": -Infinity, "prompt": "ok"}',
        b'{"prompt": "ok", "prompt": 5}',
    ],
    ids=range(11),
)
def test_large_and_odd_bodies(served, page, body):
    check(served, page, body)
