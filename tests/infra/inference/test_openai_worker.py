import dataclasses
import json

import pytest

from infra.clock import ManualClock
from infra.contracts.errors import ConfigError, InferenceError
from infra.contracts.records import Decision, SamplingParams
from infra.inference.fake_client import FakeInferenceClient
from infra.inference.open_client import open_client, require_trainable
from infra.inference.openai_address import parse_address
from infra.inference.openai_worker import OpenAiWorker
from infra.inference.pooled_client import PooledClient
from infra.inference.rollouts import group_of, rollouts_from_reply
from infra.shards.group_summary import capabilities, check_group
from infra.text.tokenizer import load_tokenizer, write_char_tokenizer
from tests.builders import make_task
from tests.contracts.inference_client_contract import (
    InferenceClientContract,
    make_request,
    respond,
)
from tests.infra.inference.openai_server import OpenAiServer


@pytest.fixture
def serve():
    """Start an engine and a client of it whose backoff takes no time."""
    started = []

    def start(said="&version=4", leave_out=(), script=lambda n: None, **settings):
        server = OpenAiServer(FakeInferenceClient(respond=respond), script)
        server.leave_out = leave_out
        address = parse_address(f"openai+{server.url}/v1?model=tiny{said}")
        client = PooledClient([OpenAiWorker(address, **settings)], clock=ManualClock(), retries=2)
        started.extend((client, server))
        return server, client

    yield start
    for part in started:
        part.close()


class TestOpenAiClient(InferenceClientContract):
    version = 4

    @pytest.fixture
    def client(self, serve):
        return serve()[1]


def ask(client, task=None, **sampling):
    """The rollouts of one task."""
    task = task or make_task(2, sampling=SamplingParams(n=3, max_new_tokens=5, **sampling))
    request = dataclasses.replace(make_request(2), sampling=task.sampling)
    return task, rollouts_from_reply(task, client.submit(request).result())


def test_ids_log_probs_and_seeds_are_asked_for(serve):
    server, client = serve()
    request = dataclasses.replace(
        make_request(), sampling=SamplingParams(n=3, max_new_tokens=5, top_k=7, stop=("\n",))
    )
    client.submit(request).result()
    pages, bodies = zip(*sorted(server.bodies, key=lambda b: b[1]["user"]), strict=True)
    assert set(pages) == {"/v1/chat/completions"}
    assert [b["seed"] for b in bodies] == list(request.seeds), "one request per sample"
    assert bodies[0]["return_token_ids"] and bodies[0]["include_stop_str_in_output"]
    assert (bodies[0]["model"], bodies[0]["top_k"], bodies[0]["stop"]) == ("tiny", 7, ["\n"])


def test_a_tokenizer_makes_it_send_ids(serve, tmp_path):
    write_char_tokenizer(tmp_path, "\n" + "".join(map(chr, range(32, 127))), eos="\n")
    tokenizer = load_tokenizer(tmp_path)
    server, client = serve(leave_out=("prompt_token_ids",), tokenizer=tokenizer)
    text = dataclasses.replace(make_request().messages[0], role="text")
    request = dataclasses.replace(make_request(), messages=(text,))
    reply = client.submit(request).result()
    ids = tokenizer.encode_prompt(request.messages).tolist()
    assert reply.prompt_ids.tolist() == ids
    assert reply.tokenizer_digest == tokenizer.digest
    assert {page for page, _ in server.bodies} == {"/v1/completions"}
    assert all(body["prompt"] == ids for _, body in server.bodies)


@pytest.mark.parametrize(
    ("said", "leave_out", "sampling"),
    [
        ("&version=4", ("token_ids",), {}),
        ("&version=4", ("logprobs",), {}),
        ("&version=4", ("prompt_token_ids",), {}),
        ("&version=4&ids=no", (), {}),
        ("&version=4&logprobs=none", (), {}),
        ("", (), {}),
        ("&version=4", (), {"temperature": 0.7}),
        ("&version=4&logprobs=sampled", (), {"top_p": 0.9}),
        ("&version=4&logprobs=sampled", (), {"top_k": 5}),
        ("&version=4&logprobs=sampled", (), {"min_p": 0.1}),
        ("&version=4&logprobs=sampled", (), {"banned_token_ids": (0,)}),
        ("&version=4&logprobs=sampled&thinking=yes", (), {"max_thinking_tokens": 3}),
        ("&version=4&logprobs=sampled", (), {"temperature": 0.0}),
    ],
)
def test_what_lacks_anything_is_scorable_and_never_trainable(serve, said, leave_out, sampling):
    task, rollouts = ask(serve(said, leave_out)[1], **sampling)
    assert [r.response_text for r in rollouts] == ["7\n", "seven", "\u00e9\U0001f600\x00"]
    assert all(r.response_ids is None and r.behaviour_logprobs is None for r in rollouts)
    group = dataclasses.replace(group_of(task, rollouts), decision=Decision.REJECTED, reason="x")
    assert check_group(group, "") == []
    assert capabilities([group]) == ("scorable",)
    assert len({r.rollout_id for r in rollouts}) == 3
    # The same endpoint for a run that trains: one clear line instead.
    _, strict = serve(said, leave_out, trainable=True)
    with pytest.raises(InferenceError, match="its rollouts cannot be trained on: ") as error:
        ask(strict, **sampling)
    assert not error.value.retryable


def test_declared_log_probs_of_the_sampled_distribution_are_both_columns(serve):
    task, rollouts = ask(serve("&version=4&logprobs=sampled")[1], temperature=0.7)
    assert rollouts[0].behaviour_logprobs.tolist() == rollouts[0].raw_logprobs.tolist()
    assert rollouts[0].weights == ((4, "unverified:tiny"),)
    assert capabilities([group_of(task, rollouts)]) == ("scorable", "trainable")


def test_a_version_that_it_does_not_serve_is_refused(serve):
    server, client = serve()
    with pytest.raises(InferenceError, match="serves version 4, as its address says; version 5"):
        client.submit(make_request(version=5)).result()
    assert server.calls == 0


def choice(**changed):
    told = {"text": "ab", "finish_reason": "stop", "token_ids": [1, 2], "prompt_token_ids": [3]}
    return {"choices": [told | {"logprobs": {"token_logprobs": [-1.0, -2.0]}} | changed]}


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"choices": []},
        choice(token_ids=[1]),
        choice(token_ids=["a", "b"]),
        choice(token_ids=[1, 2**40]),
        choice(finish_reason="abort"),
        choice(finish_reason=None),
        choice(text=5),
        choice(logprobs=[1, 2]),
        choice(logprobs={"token_logprobs": [-1.0, None]}),
    ],
)
def test_an_answer_that_cannot_be_is_tried_again_and_then_an_error(serve, body):
    server, client = serve(script=lambda n: (200, json.dumps(body).encode()))
    with pytest.raises(InferenceError, match="gave up"):
        client.submit(make_request(n=1)).result()
    assert server.calls == 3
    _, client = serve(script=lambda n: None if n else (200, json.dumps(body).encode()))
    assert len(client.submit(make_request(n=1)).result().samples) == 1


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("openai+http://h:1/v1", "model is missing"),
        ("openai+http://h/v1?model=m", "give openai"),
        ("openai+ftp://h:1/v1?model=m", "give openai"),
        ("openai+http://h:99999/v1?model=m", "give openai"),
        ("openai+http://h:1/v1?model=m&version=x", "version must be"),
        ("openai+http://h:1/v1?model=m&logprobs=both", "one of sampled, model, none"),
        ("openai+http://h:1/v1?model=m&ids=maybe", "yes or no"),
        ("openai+http://h:1/v1?model=m&options=maybe", "options must be yes or no"),
        ("openai+http://h:1/v1?model=m&sedd=1", "unknown 'sedd'"),
    ],
)
def test_bad_addresses_are_refused(url, says):
    with pytest.raises(ConfigError, match=says):
        open_client(url)


def test_a_run_that_trains_refuses_at_its_start():
    client = open_client("openai+https://host/v1?model=m&ids=no")
    with pytest.raises(ConfigError, match="cannot be trained on: it returns no token ids"):
        require_trainable(client, SamplingParams())
    client.close()
    both = open_client("http://h:1,openai+http://h:2/v1?model=m")
    with pytest.raises(ConfigError, match="give version=N"):
        require_trainable(both, SamplingParams())
    both.close()
    require_trainable(open_client("fake:"), SamplingParams(top_p=0.9))


def test_options_are_sent_under_their_usual_names_and_only_if_asked_for(serve):
    server, client = serve()
    ask(client)
    plain = {"model", "max_tokens", "temperature", "top_p", "seed", "user"}
    more = {"return_token_ids", "logprobs", "top_logprobs", "messages"}
    assert server.bodies[0][1].keys() == plain | more
    asked = {"min_p": 0.1, "min_new_tokens": 2, "stop_token_ids": (4,), "ignore_eos": True}
    ask(client, **asked, banned_token_ids=(7,), logit_bias=((8, 1.5),))
    body = server.bodies[-1][1]
    assert (body["min_p"], body["min_tokens"], body["stop_token_ids"]) == (0.1, 2, [4])
    assert body["ignore_eos"] and body["logit_bias"] == {"7": -100.0, "8": 1.5}


@pytest.mark.parametrize(
    ("said", "sampling", "says"),
    [
        ("&options=no", {"top_k": 3, "min_p": 0.1}, "it takes no top_k, min_p"),
        ("", {"max_thinking_tokens": 5}, "needs an engine that marks what it forced"),
    ],
)
def test_what_an_engine_cannot_do_is_refused_before_anything_is_sent(serve, said, sampling, says):
    server, client = serve("&version=4" + said)
    with pytest.raises(InferenceError, match=says) as error:
        ask(client, **sampling)
    assert (server.calls, error.value.retryable) == (0, False)
    with pytest.raises(ConfigError, match=says):
        require_trainable(client, SamplingParams(**sampling))
