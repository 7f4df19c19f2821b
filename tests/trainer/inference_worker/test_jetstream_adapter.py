"""Our engine under JetStream's own orchestrator. Skipped where the package is not installed."""

import asyncio
import functools
import logging

import jax
import numpy as np
import pytest

from infra.contracts.errors import ConfigError
from infra.text.tokenizer import load_tokenizer, write_char_tokenizer
from trainer.inference_worker.config import InferenceConfig
from trainer.inference_worker.engine.counting_engine import CountingEngine
from trainer.inference_worker.engine.decoder_engine import DecoderEngine
from trainer.inference_worker.engine.engine_api import SlotSampling
from trainer.inference_worker.engine.jetstream_adapter import JetStreamEngine, import_jetstream
from trainer.model.config import ModelConfig
from trainer.model.params_io import to_named
from trainer.model.transformer import init_params

pytest.importorskip("jetstream", reason="docs/worker.md says how to install it")
CONFIG = ModelConfig(layers=2, dim=32, heads=4, kv_heads=2, head_dim=8, ffn=48, vocab=16)
MAX_LEN = 40
GREEDY = SlotSampling(seed=0, temperature=0.0)
TEXTS = ["abcab", "d", "effacedbag", "gab", "bead", "faced", "a", "cabbage", "deaf", "ebb"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_char_tokenizer(folder, "abcdefghijklmn.", eos=".")
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def engine():
    return DecoderEngine(CONFIG, InferenceConfig(slots=6, max_len=MAX_LEN, prefill_tokens=32))


@pytest.fixture(scope="module")
def adapted(engine, tokenizer):
    return JetStreamEngine(engine, tokenizer, GREEDY)


@pytest.fixture(scope="module")
def params(adapted):
    drawn = jax.jit(functools.partial(init_params, CONFIG))(jax.random.key(2))
    return adapted.load_params(to_named(jax.tree.map(lambda leaf: leaf * 3, drawn)))


def greedy(engine, tokenizer, ids, count):
    """What our own engine draws, without the end token."""
    prefix = engine.prefill(padded_tokens=np.array(ids, np.int32), true_length=len(ids))
    state, found = engine.insert(prefix, engine.init_decode_state(), 0, GREEDY), []
    while len(found) < count and len(ids) + len(found) < MAX_LEN:
        state, result = engine.generate(state)
        token = int(result.convert_to_numpy().tokens[0])
        if token in tokenizer.eos_ids:
            break
        found.append(token)
    return found


def orchestrated(adapted, params, requests, **how):
    """Ids and text of every request, all of them sent at once to JetStream's own driver."""
    orchestrator = import_jetstream().orchestrator
    driver = orchestrator.Driver([adapted], [adapted], [params], [params], **how)

    async def one(request):
        samples = [
            answer.stream_content.samples[0]
            async for answer in orchestrator.LLMOrchestrator(driver).Decode(request)
        ]
        ids = [i for sample in samples for i in sample.token_ids]
        return ids, "".join(sample.text for sample in samples)

    async def together():
        return await asyncio.gather(*map(one, requests))

    try:
        return asyncio.run(together())
    finally:
        driver.stop()


@pytest.mark.parametrize("interleaved", [False, True])
def test_jetstreams_driver_finds_the_greedy_continuations(
    adapted, params, engine, tokenizer, interleaved
):
    pb2 = import_jetstream().jetstream_pb2
    texts = [
        pb2.DecodeRequest(text_content=pb2.DecodeRequest.TextContent(text=text), max_tokens=7)
        for text in TEXTS
    ]
    ids = [tokenizer.encode(text).tolist() for text in TEXTS]
    exact = [
        pb2.DecodeRequest(
            token_content=pb2.DecodeRequest.TokenContent(token_ids=prompt), max_tokens=100
        )
        for prompt in ids
    ]
    found = orchestrated(adapted, params, texts + exact, interleaved_mode=interleaved)
    for prompt, (drawn, text) in zip(ids, found[: len(ids)], strict=True):
        assert drawn == greedy(engine, tokenizer, prompt, 7)
        assert text == tokenizer.decode(drawn)
    for prompt, (drawn, _) in zip(ids, found[len(ids) :], strict=True):
        assert drawn == greedy(engine, tokenizer, prompt, 100)  # to its end, or that of the cache


def test_prompts_that_do_not_fit_keep_their_end_and_empty_ones_get_a_token(
    adapted, params, engine, tokenizer
):
    pb2 = import_jetstream().jetstream_pb2
    prompts = [[1 + i % 14 for i in range(90)], []]
    requests = [
        pb2.DecodeRequest(
            token_content=pb2.DecodeRequest.TokenContent(token_ids=prompt), max_tokens=5
        )
        for prompt in prompts
    ]
    (long, _), (empty, _) = orchestrated(adapted, params, requests)
    assert long == greedy(engine, tokenizer, prompts[0][-adapted.max_prefill_length :], 5)
    assert empty == greedy(engine, tokenizer, [tokenizer.pad_id], 5)


def test_it_is_an_engine_and_the_process_logs_as_before(adapted):
    jetstream = import_jetstream()
    assert isinstance(adapted, jetstream.engine_api.Engine)
    for kind, ours in (
        (jetstream.engine_api.Engine, adapted),
        (jetstream.tokenizer_api.Tokenizer, adapted.build_tokenizer(adapted.get_tokenizer())),
    ):
        assert not [name for name in kind.__abstractmethods__ if not hasattr(ours, name)]
    assert logging.getLogger().level != logging.DEBUG


def test_several_steps_are_speculations_and_every_insertion_has_its_own_seed(tokenizer):
    adapted = JetStreamEngine(CountingEngine(2, 20, 100, steps=3), tokenizer, SlotSampling(seed=5))
    state, params = adapted.init_decode_state(), adapted.load_params({})
    for slot, last in enumerate((10, 20)):
        prefix = adapted.prefill(params=params, padded_tokens=np.full(16, last), true_length=14)
        state = adapted.insert(prefix, state, slot=slot)
    for lengths, valid in ((3, [1, 1, 1]), (6, [1, 1, 1]), (9, [0, 0, 0])):
        state, result = adapted.generate(params, state)
        slots = [result.get_result_at_slot(slot) for slot in range(2)]
        assert [slot.tokens[0, 0] for slot in slots] == [15 + lengths - 3, 26 + lengths - 3]
        assert [slot.lengths[0] for slot in slots] == [lengths] * 2
        assert slots[0].valid.tolist() == [valid]


def test_a_cache_that_jetstream_cannot_fill_is_refused(tokenizer):
    with pytest.raises(ConfigError, match="17 or more"):
        JetStreamEngine(CountingEngine(2, 16, 100), tokenizer, GREEDY)
