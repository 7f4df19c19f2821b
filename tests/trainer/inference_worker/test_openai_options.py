"""Sampling options on the OpenAI pages, without the stock client; our own client of these pages."""

import http.client
import json

import numpy as np
import pytest

from infra.contracts.ids import sample_seed
from infra.contracts.json_codec import to_json
from infra.contracts.records import GenerateRequest, Message, SamplingParams
from infra.inference.open_client import open_client
from infra.inference.reply_checks import check_reply
from tests.trainer.inference_worker.served_worker import Pieces, Served
from trainer.inference_worker.engine.counting_engine import CountingEngine

PIECES = Pieces()
PROMPT = "Q: 1"
SEED = 44  # the sample begins at a place where every byte is a character
LAST = PIECES.encode_prompt_text(PROMPT)[-1]
ASK = {"prompt": PROMPT, "seed": SEED, "max_tokens": 12}


@pytest.fixture(scope="module")
def served():
    with Served() as served:
        yield served


def counted(seed, length=12):
    """What the counting engine draws for the first sample."""
    first = LAST + sample_seed(seed, 0)
    return [(first + i) % PIECES.vocab_size for i in range(length)]


IDS = counted(SEED)


def post(served, body, page="/v1/completions"):
    """Status and text."""
    connection = http.client.HTTPConnection(*served.address, timeout=20)
    connection.request("POST", page, body if isinstance(body, bytes) else json.dumps(body))
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response.status, text


def choice_of(served, **more):
    status, text = post(served, ASK | more)
    assert status == 200, text
    return json.loads(text)["choices"][0]


def generate_request(**sampling):
    return GenerateRequest(
        request_id="own",
        messages=(Message(role="text", content=PROMPT),),
        sampling=SamplingParams(n=1, **sampling),
        seeds=(SEED,),
        min_version=0,
        timeout_secs=10.0,
    )


def test_options_under_their_usual_names(served):
    more = {"stop_token_ids": [IDS[4]], "min_tokens": 2, "min_p": 0.1, "ignore_eos": True}
    choice = choice_of(served, logit_bias={"1": -100, "2": 3}, **more)
    assert (choice["text"], choice["finish_reason"]) == (PIECES.decode(IDS[:5]), "stop")
    late = choice_of(served, stop_token_ids=[IDS[1]], min_tokens=3)
    assert late["finish_reason"] == "length"  # the fake engine heeds no bias


def test_a_stop_string_stays_in_the_text_if_asked_for(served):
    stop = PIECES.decode(IDS[2:4])
    assert choice_of(served, stop=stop)["text"] == PIECES.decode(IDS[:2])
    for name in ("include_stop_str_in_output", "no_stop_trim"):
        kept = choice_of(served, stop=stop, return_token_ids=True, **{name: True})
        assert (kept["text"], kept["token_ids"]) == (PIECES.decode(IDS[:4]), IDS[:4])
        _, text = post(served, ASK | {"stop": stop, "stream": True, name: True})
        events = [json.loads(line[6:]) for line in text.split("\n\n")[:-2]]
        assert "".join(event["choices"][0]["text"] for event in events) == kept["text"]


def test_forced_tokens_are_marked(served):
    marks = [PIECES.decode([LAST]), PIECES.decode(IDS[5:7])]
    more = {"thinking_token_budget": 3, "thinking_marks": marks, "return_token_ids": True}
    choice = choice_of(served, logprobs=0, **more)
    assert choice["loss_mask"][:9] == [True] * 3 + [False] * 4 + [True] * 2
    assert choice["raw_logprobs"][3:7] == choice["logprobs"]["token_logprobs"][3:7] == [0] * 4


@pytest.mark.parametrize(
    ("changes", "param", "message"),
    [
        ({"logit_bias": {"5": 101}}, None, "each must be in"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "token ids as keys"),
        ({"logit_bias": {"5": "a"}}, "5", "a finite number"),
        ({"logit_bias": {"999": 1}}, None, "token id 999 is outside the vocabulary"),
        ({"min_p": 2}, None, "min_p = 2"),
        ({"min_tokens": 17}, None, "min_new_tokens = 17 is above"),
        ({"stop_token_ids": [1.5]}, "stop_token_ids", "a list of integers"),
        ({"stop_token_ids": [-1]}, None, "outside"),
        ({"thinking_marks": ["a"]}, None, "give two texts"),
        ({"thinking_token_budget": 3}, None, "thinking_marks: "),
        ({"logprobs": 5}, "logprobs", "from 0 to 1"),
    ],
)
def test_what_is_wrong_is_refused_by_name(served, changes, param, message):
    status, text = post(served, ASK | changes)
    error = json.loads(text)["error"]
    assert (status, error["param"]) == (400, param) and message in error["message"]


class Diverged(CountingEngine):
    """Its weights are no numbers any more."""

    def generate(self, decode_state, *, slots=None):
        state, result = super().generate(decode_state, slots=slots)
        result.data[1:] = np.nan
        return state, result


def test_log_probs_that_are_no_numbers_are_no_fault_of_the_server():
    with Served(kind=Diverged) as served:
        for body, page in (
            (ASK, "/v1/completions"),
            (ASK | {"stream": True}, "/v1/completions"),
            (to_json(generate_request()), "/v1/generate"),
        ):
            status, text = post(served, body, page)
            assert status == 503
            assert "the model diverged: version 7 gives log-probs that are not finite" in text


def test_our_own_client_speaks_to_our_own_page(served):
    """Stop strings, options and forced tokens; and what a trainer needs comes back."""
    said = "&version=7&logprobs=sampled&thinking=yes"
    host, port = served.address
    client = open_client(f"openai+http://{host}:{port}/v1?model=counting{said}")
    request = generate_request(
        max_new_tokens=12,
        stop=(PIECES.decode(IDS[7:9]),),
        stop_token_ids=(IDS[10],),
        ignore_eos=True,
        max_thinking_tokens=2,
        thinking_marks=(PIECES.decode([LAST]), PIECES.decode(IDS[5:7])),
    )
    reply = client.submit(request).result()
    client.close()
    check_reply(reply, samples=1, min_version=7)
    (sample,) = reply.samples
    assert sample.response_text == PIECES.decode(IDS[:9])
    assert sample.response_ids.tolist() == IDS[:9]
    assert sample.loss_mask.tolist() == [True] * 2 + [False] * 5 + [True] * 2
