"""The engine against the model itself: log-probs, prefixes, independence of slot and batch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trainer.inference_worker.config import InferenceConfig
from trainer.inference_worker.engine.decoder_engine import DecoderEngine
from trainer.inference_worker.engine.engine_api import SlotSampling
from trainer.inference_worker.engine.packed_row import SMALLEST_ROW, packed_row, packs_of
from trainer.inference_worker.engine.thinking import SlotThinking
from trainer.model.config import ModelConfig
from trainer.model.kv_cache import spans_of
from trainer.model.params_io import to_named
from trainer.model.transformer import Quantised, head_logits, hidden_states, init_params

CONFIG = ModelConfig(
    layers=2, dim=32, heads=4, kv_heads=2, head_dim=8, ffn=48, vocab=20, max_len=64, qk_norm=True
)
SETTINGS = InferenceConfig(slots=6, max_len=24, prefill_tokens=32)
ALWAYS = 2**31 - 1
PROMPTS = [np.array(p, np.int32) for p in ([3, 1, 4, 1, 5], [7], [2, 7, 1, 8, 2, 8, 1, 8])]


@pytest.fixture(scope="module")
def params():
    drawn = jax.jit(functools.partial(init_params, CONFIG))(jax.random.key(1))
    return jax.tree.map(lambda leaf: leaf * 3, drawn)  # far from uniform


@pytest.fixture(scope="module")
def engine(params):
    engine = DecoderEngine(CONFIG, SETTINGS)
    engine.update_params(engine.load_params(to_named(params)), 5)
    return engine


@functools.partial(jax.jit, static_argnums=0)
def _logits(config, params, row):
    positions = jnp.arange(row.shape[1])[None]
    hidden = hidden_states(params, config, row, positions, jnp.ones_like(row), jnp.zeros_like(row))
    return head_logits(params, config, hidden)


def teacher_forced(params, prompt, ids, temperature=1.0, length=SETTINGS.max_len):
    """Log-probs of ``ids`` after ``prompt`` by the whole-row forward pass."""
    row = np.zeros((1, length), np.int32)
    row[0, : len(prompt) + len(ids)] = [*prompt, *ids]
    logits = np.asarray(_logits(CONFIG, params, row))[0] / temperature
    logprobs = np.asarray(jax.nn.log_softmax(logits, axis=-1))
    at = np.arange(len(prompt) - 1, len(prompt) - 1 + len(ids))
    return logprobs[at, ids], logprobs[at]


def run(engine, jobs, steps=6, together=True):
    """Insert (prompt, slot, sampling) jobs, generate; return {slot: (ids, behaviour, raw)}."""
    state = engine.init_decode_state()
    prompts = [prompt for prompt, _, _ in jobs]
    prefixes = (
        engine.prefill_batch(prompts)
        if together
        else [engine.prefill(padded_tokens=p, true_length=len(p)) for p in prompts]
    )
    for prefix, (_, slot, sampling) in zip(prefixes, jobs, strict=True):
        state = engine.insert(prefix, state, slot, sampling)
    results = []
    for _ in range(steps):
        state, result = engine.generate(state)
        results.append(result.convert_to_numpy())
    return {
        slot: tuple(
            np.array([getattr(r, column)[slot] for r in results])
            for column in ("tokens", "log_prob", "raw_log_prob")
        )
        for _, slot, _ in jobs
    }


def test_log_probs_are_those_of_the_model(engine, params):
    jobs = [(p, i, SlotSampling(seed=i, temperature=0.7 + 0.3 * i)) for i, p in enumerate(PROMPTS)]
    for slot, (ids, behaviour, raw) in run(engine, jobs).items():
        prompt, _, sampling = jobs[slot]
        expected, _ = teacher_forced(params, prompt, ids, sampling.temperature)
        np.testing.assert_allclose(raw, expected, atol=1e-4)
        np.testing.assert_array_equal(raw, behaviour)


SHAPED = {
    "top_p": {"temperature": 0.8, "top_p": 0.7},
    "min_p": {"temperature": 1.7, "min_p": 0.1},
    "greedy": {"temperature": 0.0},
    "banned": {"biases": ((3, -np.inf, ALWAYS), (5, 2.0, ALWAYS))},
    "late": {"top_k": 4, "biases": tuple((t, -np.inf, 8) for t in range(10))},
    "thinking": {"thinking": SlotThinking(2, (3,), (11, 12), (3,), 0)},
}


def test_raw_is_the_model_and_behaviour_what_was_drawn_from(engine, params):
    """Beside the trainer's forward pass: raw to 1e-4, behaviour renormalised over what was kept."""
    names = list(SHAPED)
    prompt = PROMPTS[0]
    jobs = [(prompt, i, SlotSampling(seed=i, **SHAPED[name])) for i, name in enumerate(names)]
    together = run(engine, jobs)
    for slot, name in enumerate(names):
        ids, behaviour, raw = together[slot]
        alone = run(engine, [(prompt, 0, jobs[slot][2])])[0]
        for one, other in zip(together[slot], alone, strict=True):
            np.testing.assert_array_equal(one, other)
        sampling = jobs[slot][2]
        heat = sampling.temperature or 1.0
        expected, table = teacher_forced(params, prompt, ids, heat)
        forced = np.isin(np.arange(6), [2, 3]) if name == "thinking" else np.zeros(6, bool)
        np.testing.assert_allclose(raw[~forced], expected[~forced], atol=1e-4)
        assert not raw[forced].any() and not behaviour[forced].any()
        if name == "thinking":
            assert ids[2:4].tolist() == [11, 12]
        for i, row in enumerate(table.astype(np.float64)):
            for token, bias, until in sampling.biases:
                row[token] += bias / heat if len(prompt) + i < until else 0
            kept = np.sort(np.exp(row - row.max()))[::-1]
            kept = kept[: sampling.top_k or None]
            before = (np.cumsum(kept) - kept) / kept.sum()
            kept = kept[(before < sampling.top_p) & (kept >= sampling.min_p)]
            own = row[ids[i]] - row.max() - np.log(kept.sum())
            assert forced[i] or abs(behaviour[i] - own) < 1e-4, (name, i)
    late = together[names.index("late")][0]
    assert min(late[:3]) >= 10 and min(together[names.index("banned")][0] != 3)


def test_samples_depend_on_seed_alone_not_on_slot_batch_or_packing(engine):
    base = [(p, i, SlotSampling(seed=10 + i)) for i, p in enumerate(PROMPTS)]
    first = run(engine, base)
    moved = [(p, 5 - slot, sampling) for p, slot, sampling in reversed(base)]
    second = run(engine, moved, together=False)
    alone = run(engine, [base[2]])
    for _, slot, _ in base:
        np.testing.assert_array_equal(first[slot][0], second[5 - slot][0])
    np.testing.assert_array_equal(first[2][0], alone[2][0])
    other = run(engine, [(base[2][0], 2, SlotSampling(seed=99))])
    assert (first[2][0] != other[2][0]).any()


def test_greedy_is_the_best_token_with_log_probs_of_temperature_one(engine, params):
    jobs = [(p, i, SlotSampling(seed=i, temperature=0.0)) for i, p in enumerate(PROMPTS)]
    for slot, (ids, behaviour, raw) in run(engine, jobs).items():
        expected, table = teacher_forced(params, PROMPTS[slot], ids)
        np.testing.assert_array_equal(ids, table.argmax(axis=-1))
        np.testing.assert_allclose(raw, expected, atol=1e-4)
        np.testing.assert_array_equal(raw, behaviour)


def test_one_prefix_serves_many_slots(engine):
    prefix = engine.prefill(padded_tokens=PROMPTS[0], true_length=5)
    samplings = [SlotSampling(seed=s) for s in range(4)]
    state = engine.bulk_insert([prefix] * 4, engine.init_decode_state(), [5, 0, 3, 2], samplings)
    got = []
    for _ in range(6):
        state, result = engine.generate(state)
        got.append(result.convert_to_numpy().tokens)
    for slot, sampling in zip([5, 0, 3, 2], samplings, strict=True):
        alone = run(engine, [(PROMPTS[0], 1, sampling)])[1][0]
        np.testing.assert_array_equal([tokens[slot] for tokens in got], alone)


def test_a_refilled_slot_forgets_what_ran_there(engine):
    state = engine.init_decode_state()
    prefixes = engine.prefill_batch(PROMPTS)
    state = engine.insert(prefixes[2], state, 4, SlotSampling(seed=1))
    for _ in range(30):  # far past the end of the slot
        state, _ = engine.generate(state)
    state = engine.insert(prefixes[0], state, 4, SlotSampling(seed=2))
    ids = []
    for _ in range(6):
        state, result = engine.generate(state)
        ids.append(int(result.convert_to_numpy().get_result_at_slot(4).tokens))
    np.testing.assert_array_equal(ids, run(engine, [(PROMPTS[0], 0, SlotSampling(seed=2))])[0][0])


def compilations(engine):
    programs = (engine._prefill, engine._chunk, engine._insert, engine._generate)
    return [program._cache_size() for program in programs]


def test_new_weights_are_used_from_the_next_step_and_nothing_compiles_again(engine, params):
    kept = engine._params
    compiled = compilations(engine)
    other = jax.tree.map(lambda leaf: leaf * 0.9, params)
    engine.update_params(engine.load_params(to_named(other)), 6)
    (ids, _, raw) = run(engine, [(PROMPTS[0], 0, SlotSampling(seed=3))])[0]
    np.testing.assert_allclose(raw, teacher_forced(other, PROMPTS[0], ids)[0], atol=1e-4)
    assert compilations(engine) == compiled
    _, result = engine.generate(engine.init_decode_state())
    assert result.version == 6
    engine.update_params(kept, 5)


def test_warm_up_compiles_all_that_requests_need(params):
    engine = DecoderEngine(CONFIG, SETTINGS)
    assert len(list(engine.warm_up())) == 3  # two widths, one row
    sizes = compilations(engine)
    engine.update_params(engine.load_params(to_named(params)), 0)
    run(engine, [(p, i, SlotSampling(seed=i, top_k=3)) for i, p in enumerate(PROMPTS)], steps=2)
    shaped = [(PROMPTS[0], i, SlotSampling(seed=i, **s)) for i, s in enumerate(SHAPED.values())]
    run(engine, shaped, steps=1)
    for count in range(1, SETTINGS.slots + 1):
        engine.generate(engine.init_decode_state(), slots=range(count))
    assert compilations(engine) == sizes


@pytest.mark.parametrize("length", [0, 24])
def test_prompts_that_do_not_fit_are_refused(engine, length):
    with pytest.raises(ValueError, match=f"prompt of {length} tokens; 1 to 23 fit"):
        engine.prefill_batch([np.zeros(length, np.int32)])


def test_packs_keep_order_and_budget():
    prompts = [np.arange(n) + 10 * i for i, n in enumerate((5, 5, 9, 40, 2, 2))]
    packs = packs_of(prompts, 12)
    assert [[len(p) for p in pack] for pack in packs] == [[5, 5], [9], [40], [2, 2]]


def test_what_all_prompts_begin_with_lies_in_the_row_once():
    row, shared, owns = packed_row(
        [np.array(p) for p in ([1, 2, 3, 4, 9], [1, 2, 5, 9], [1, 2, 9])]
    )
    assert (row.shape, shared, owns) == ((4, SMALLEST_ROW), 2, [0, 2, 3])
    assert row[:, :6].tolist() == [
        [1, 2, 3, 4, 5, 0],
        [0, 1, 2, 3, 2, 0],
        [1, 1, 2, 2, 3, 0],
        [0, 0, 1, 1, 1, 0],
    ]
    row, shared, owns = packed_row([np.array([7])])
    assert (row.sum(), shared, owns) == (0, 0, [0])


def test_a_shared_beginning_changes_no_log_prob(engine, params):
    prompts = [np.array([4, 8, 15, 16, 2, *rest], np.int32) for rest in ([3], [4, 2], [9, 9, 9])]
    jobs = [(p, i, SlotSampling(seed=i)) for i, p in enumerate(prompts)]
    for slot, (ids, _, raw) in run(engine, jobs).items():
        expected, _ = teacher_forced(params, prompts[slot], ids)
        np.testing.assert_allclose(raw, expected, atol=1e-4)


def test_a_long_prompt_is_prefilled_in_pieces(params):
    """Whole or in two or three pieces: log-probs agree to 1e-5; nothing compiles on the way."""
    prompt = np.random.default_rng(0).integers(0, CONFIG.vocab, 43).astype(np.int32)
    whole = DecoderEngine(CONFIG, InferenceConfig(slots=2, max_len=60, prefill_tokens=64))
    pieces = DecoderEngine(CONFIG, InferenceConfig(slots=2, max_len=60, prefill_tokens=20))
    assert len(list(pieces.warm_up())) == 3
    sizes = compilations(pieces)
    for engine in (whole, pieces):
        engine.update_params(engine.load_params(to_named(params)), 0)
    for length in (21, 22, 41, 42, 43):  # one less is prefilled: the last token is not
        job = (prompt[:length], 1, SlotSampling(seed=length))
        one, other = run(whole, [job])[1], run(pieces, [job])[1]
        np.testing.assert_array_equal(one[0], other[0])
        np.testing.assert_allclose(one[2], other[2], atol=1e-5)
    assert compilations(pieces) == sizes
    mixed = [(prompt[:30], 0, SlotSampling(seed=1)), (prompt[3:9], 1, SlotSampling(seed=2))]
    np.testing.assert_allclose(run(whole, mixed)[1][2], run(pieces, mixed)[1][2], atol=1e-5)


def test_several_steps_in_a_call_draw_what_single_steps_draw(engine, params):
    settings = InferenceConfig(slots=6, max_len=24, prefill_tokens=32, steps_per_call=3)
    many = DecoderEngine(CONFIG, settings)
    many.update_params(many.load_params(to_named(params)), 5)
    thinking = SlotThinking(2, (3,), (11, 12), (3,), 0)
    jobs = [(p, i, SlotSampling(seed=i)) for i, p in enumerate(PROMPTS[:2])]
    jobs.append((PROMPTS[2], 2, SlotSampling(seed=2, thinking=thinking)))
    state = many.init_decode_state()
    samplings = [sampling for _, _, sampling in jobs]
    state = many.bulk_insert(many.prefill_batch(PROMPTS), state, range(3), samplings)
    steps = []
    for slots in (range(3), range(6)):  # both ways: rows of a smaller width, and all
        state, result = many.generate(state, slots=slots)
        steps += result.convert_to_numpy().steps()
    assert len(steps) == 6
    for slot, (ids, behaviour, raw) in run(engine, jobs).items():
        columns = np.stack([step.data[:, slot] for step in steps], axis=1)
        np.testing.assert_array_equal(columns, np.stack([ids, behaviour, raw]))


@pytest.mark.parametrize(("dtype", "drift"), [("bfloat16", 0.2), ("int8", 0.2)])
def test_narrow_matrices_keep_head_and_cache_in_float32(params, dtype, drift):
    """Log-probs are those of the rounded matrices, and not far from those of the right ones."""
    engine = DecoderEngine(CONFIG, InferenceConfig(slots=2, max_len=24, dtype=dtype))
    loaded = engine.load_params(to_named(params))
    assert loaded["embed"].dtype == jnp.float32
    narrow = loaded["layers"][0]["q"]
    assert (narrow.values if dtype == "int8" else narrow).dtype == dtype
    engine.update_params(loaded, 0)
    assert engine.init_decode_state().cache.keys[0][0].dtype == jnp.float32
    ids, _, raw = run(engine, [(PROMPTS[0], 0, SlotSampling(seed=3))])[0]
    np.testing.assert_allclose(raw, teacher_forced(params, PROMPTS[0], ids)[0], atol=drift)
    if dtype == "int8":  # bfloat16 also rounds what is multiplied

        def wide(w):
            return w.values * w.scale[:, None] if isinstance(w, Quantised) else w

        same = jax.tree.map(wide, loaded, is_leaf=lambda w: isinstance(w, Quantised))
        np.testing.assert_allclose(raw, teacher_forced(same, PROMPTS[0], ids)[0], atol=1e-4)


def test_a_slot_does_not_notice_how_far_the_others_are(params):
    """Blocks of the cache that nobody has reached are left out: no bit of a result depends on it,
    and attention is right on both sides of a block's end."""
    engine = DecoderEngine(CONFIG, InferenceConfig(slots=2, max_len=150, prefill_tokens=128))
    engine.update_params(engine.load_params(to_named(params)), 0)
    assert spans_of(150) == [(0, 64), (64, 128), (128, 150)]
    long = np.random.default_rng(0).integers(0, CONFIG.vocab, 126).astype(np.int32)
    for near, far in ((5, 61), (61, 126), (5, 126)):
        jobs = [(long[:near], 0, SlotSampling(seed=1)), (long[:far], 1, SlotSampling(seed=2))]
        both, alone = (run(engine, some, together=False) for some in (jobs, jobs[:1]))
        for one, other in zip(both[0], alone[0], strict=True):
            np.testing.assert_array_equal(one, other)
        for prompt, slot, _ in jobs:
            ids, _, raw = both[slot]
            expected, _ = teacher_forced(params, prompt, ids, length=150)
            np.testing.assert_allclose(raw, expected, atol=1e-4)


def test_a_step_of_some_slots_moves_these_and_no_other(engine):
    """Wherever they lie, whatever the width: all draw what they would have drawn together."""
    jobs = [(PROMPTS[i % 3], i, SlotSampling(seed=i, top_k=3 * (i % 2))) for i in range(6)]
    full = run(engine, jobs, steps=5)
    state = engine.init_decode_state()
    prefixes = engine.prefill_batch([prompt for prompt, _, _ in jobs])
    state = engine.bulk_insert(prefixes, state, range(6), [sampling for _, _, sampling in jobs])
    got = [[] for _ in jobs]
    for slots in ([5], [1, 4], [0, 2, 5], [0, 1, 2, 3], range(5), [4, 3], range(6), [5, 1, 3, 0]):
        state, result = engine.generate(state, slots=slots)
        data = result.convert_to_numpy().data
        for slot in slots:
            got[slot].append(data[:, slot])
    for slot, columns in enumerate(got):
        ids, behaviour, raw = np.stack(columns, axis=1)
        steps = slice(len(columns))
        for one, other in zip((ids, behaviour, raw), full[slot], strict=True):
            np.testing.assert_array_equal(one, other[steps])
