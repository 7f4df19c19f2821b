"""The stock ``openai`` client against the worker: what it asks for is what it gets."""

import pytest

from infra.contracts.ids import sample_seed
from tests.trainer.inference_worker.served_worker import Pieces, Served

openai = pytest.importorskip("openai", reason="pip install 'headrace[dev]' for the openai client")

PIECES = Pieces()
PROMPT = "Q: 1"


@pytest.fixture(scope="module")
def served():
    with Served() as served:
        yield served


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def counted(prompt, seed, k, length):
    """What the counting engine draws for sample ``k``."""
    last = PIECES.encode_prompt_text(prompt)[-1]
    first = last + sample_seed(seed, k)
    return [(first + i) % PIECES.vocab_size for i in range(length)]


def whole_text(chunks, index=0):
    return "".join(c.text for chunk in chunks for c in chunk.choices if c.index == index)


def test_models(client):
    assert [model.id for model in client.models.list()] == ["counting"]


def test_a_completion(client):
    answer = client.completions.create(
        model="counting", prompt=PROMPT, n=2, seed=3, max_tokens=5, logprobs=0
    )
    assert (answer.object, answer.model) == ("text_completion", "counting")
    assert answer.system_fingerprint == "v7-seven"
    assert [c.index for c in answer.choices] == [0, 1]
    for k, choice in enumerate(answer.choices):
        ids = counted(PROMPT, 3, k, 5)
        assert choice.text == PIECES.decode(ids)
        assert choice.finish_reason == "length"
        assert choice.logprobs.token_logprobs == [-float(i) for i in ids]
        assert choice.logprobs.tokens == [PIECES.decode([i]) for i in ids]
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (4, 10, 14)


def test_prompts_of_every_form_give_the_same_samples(client):
    ids = PIECES.encode_prompt_text(PROMPT)
    for prompt in (PROMPT, [PROMPT], ids, [ids]):
        answer = client.completions.create(model="counting", prompt=prompt, seed=3, max_tokens=4)
        assert [c.text for c in answer.choices] == [PIECES.decode(counted(PROMPT, 3, 0, 4))]
    many = client.completions.create(
        model="counting", prompt=["A: 2", PROMPT], n=2, seed=3, max_tokens=4
    )
    wanted = [PIECES.decode(counted(p, 3, k, 4)) for p in ("A: 2", PROMPT) for k in (0, 1)]
    assert [c.text for c in many.choices] == wanted
    assert many.usage.prompt_tokens == 8


def test_without_a_seed_samples_differ_from_call_to_call(client):
    texts = {
        client.completions.create(model="counting", prompt=PROMPT, max_tokens=8).choices[0].text
        for _ in range(20)
    }
    assert len(texts) > 1


def test_a_stop_string_is_not_part_of_the_text(client):
    ids = counted(PROMPT, 3, 0, 60)
    text = PIECES.decode(ids)
    at = text.index("Q: ")
    asked = {"model": "counting", "prompt": PROMPT, "seed": 3, "max_tokens": 60, "stop": ["Q: "]}
    choice = client.completions.create(**asked).choices[0]
    assert (choice.text, choice.finish_reason) == (text[:at], "stop")
    chunks = list(client.completions.create(**asked, stream=True))
    assert whole_text(chunks) == text[:at]
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_a_chat(client):
    answer = client.chat.completions.create(
        model="counting",
        messages=[{"role": "user", "content": [{"type": "text", "text": PROMPT}]}],
        seed=1,
        max_completion_tokens=6,
        logprobs=True,
        extra_body={"return_token_ids": True, "top_k": 5},
    )
    choice, ids = answer.choices[0], counted(PROMPT, 1, 0, 6)
    assert (choice.message.role, choice.message.content) == ("assistant", PIECES.decode(ids))
    assert [t.logprob for t in choice.logprobs.content] == [-float(i) for i in ids]
    assert choice.token_ids == ids
    assert choice.policy_versions == [7] * 6
    assert choice.raw_logprobs == [-2.0 * i for i in ids]
    assert answer.prompt_token_ids == PIECES.encode_prompt_text(PROMPT)


def test_a_chat_may_fill_the_context(client):
    answer = client.chat.completions.create(
        model="counting", messages=[{"role": "developer", "content": PROMPT}]
    )
    assert answer.usage.total_tokens == 64
    assert answer.choices[0].finish_reason == "length"


def test_a_streamed_completion_of_several_samples(client):
    chunks = list(
        client.completions.create(
            model="counting",
            prompt=["A: 2", PROMPT],
            n=2,
            seed=3,
            max_tokens=50,
            logprobs=1,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"return_token_ids": True},
        )
    )
    assert len(chunks) >= 5
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 200
    for index in range(4):
        own = [c for chunk in chunks for c in chunk.choices if c.index == index]
        ids = counted(("A: 2", PROMPT)[index // 2], 3, index % 2, 50)
        assert "".join(c.text for c in own) == PIECES.decode(ids)
        assert not any("\ufffd" in c.text for c in own[:-1])
        assert [i for c in own for i in c.token_ids] == ids
        assert [x for c in own if c.logprobs for x in c.logprobs.token_logprobs] == [
            -i for i in ids
        ]
        assert [c.finish_reason for c in own][-1] == "length"
        offsets = [x for c in own if c.logprobs for x in c.logprobs.text_offset]
        assert offsets == sorted(offsets)


def test_a_streamed_chat(client):
    stream = client.chat.completions.create(
        model="counting",
        messages=[{"role": "system", "content": "ok"}, {"role": "user", "content": PROMPT}],
        seed=9,
        max_tokens=40,
        stream=True,
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks)
    assert text == PIECES.decode(counted(PROMPT, 9, 0, 40))
    assert chunks[-1].choices[0].finish_reason == "length"
    assert all(chunk.usage is None for chunk in chunks)


@pytest.mark.parametrize(
    ("changes", "param", "message"),
    [
        ({"temperature": -1}, None, "temperature = -1"),
        ({"top_p": 0}, None, "top_p = 0"),
        ({"n": 0}, "n", "n is 0"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens is 0"),
        ({"prompt": [1, 999]}, "prompt", "prompt holds 999; token ids are"),
        ({"prompt": []}, "prompt", "prompt is a list of 0"),
        ({"prompt": "x" * 100}, None, "cannot be encoded"),
        ({"prompt": "a" * 64}, None, "the prompt has 64 tokens; 1 to 63 fit"),
        ({"logprobs": 5}, "logprobs", "from 0 to 1"),
        ({"echo": True}, "echo", "echo = true is not supported"),
        ({"frequency_penalty": 0.5}, "frequency_penalty", "is not supported"),
        ({"extra_body": {"guided_json": {}}}, "guided_json", "not a parameter this server knows"),
    ],
)
def test_what_is_wrong_or_not_there_is_refused_by_name(client, changes, param, message):
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        client.completions.create(**({"model": "counting", "prompt": PROMPT} | changes))
    assert (caught.value.type, caught.value.param) == ("invalid_request_error", param)


def test_tools_are_refused(client):
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    with pytest.raises(openai.BadRequestError, match="tools"):
        client.chat.completions.create(
            model="counting", messages=[{"role": "user", "content": "ok"}], tools=[tool]
        )


def test_another_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError, match="this worker serves 'counting'") as caught:
        client.completions.create(model="gpt-5", prompt=PROMPT)
    assert caught.value.code == "model_not_found"


def test_a_deadline_that_passes_before_the_first_token_has_a_status(client):
    with pytest.raises(openai.InternalServerError, match="needs version 99"):
        client.completions.create(
            model="counting",
            prompt=PROMPT,
            stream=True,
            extra_body={"min_version": 99, "timeout_secs": 0.05},
        )


def test_a_token_is_asked_for():
    with Served(token="secret") as served:
        for key, allowed in (("wrong", False), ("secret", True)):
            with openai.OpenAI(base_url=served.url + "/v1", api_key=key, max_retries=0) as client:
                if allowed:
                    assert client.completions.create(model="counting", prompt="ok").choices
                    continue
                with pytest.raises(openai.AuthenticationError):
                    client.completions.create(model="counting", prompt="ok")
                with pytest.raises(openai.AuthenticationError):
                    client.models.list()
