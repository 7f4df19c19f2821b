"""Every family against transformers' logits, the engine against the model, packing, a step."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.trainer.model.families import NAMES, golden
from tests.trainer.sequences import make_sequences
from trainer.check import count_parameters
from trainer.config import OptimizerConfig
from trainer.inference_worker.config import InferenceConfig
from trainer.inference_worker.engine.decoder_engine import DecoderEngine
from trainer.inference_worker.engine.engine_api import SlotSampling
from trainer.model.config import ModelConfig
from trainer.model.params_io import count_params, to_named
from trainer.model.transformer import head_logits, hidden_states, init_params
from trainer.objective.grpo import Grpo
from trainer.optimizer import build_optimizer
from trainer.packing import PackingConfig, pack
from trainer.state import new_state
from trainer.step import StepSettings, build_train_step

LOGIT_BOUND = 1e-4
"""max |dlogit| to transformers, both float32."""
BF16_BOUND = 0.05
"""max |dlogp| of one token with the layers' matrices in bfloat16."""
HOT = 6.0
"""Temperature at which the engine samples: the stored models are far from uniform."""


@pytest.fixture(scope="module", params=NAMES)
def model(request, tmp_path_factory):
    return golden(request.param, tmp_path_factory.getbasetemp())


@pytest.fixture(
    scope="module", params=["llama", "mistral", "qwen2-window", "qwen3", "gemma2", "gemma3"]
)
def family(request, tmp_path_factory):
    """One model a family: what follows does not depend on its rotary tables."""
    return golden(request.param, tmp_path_factory.getbasetemp())


@functools.partial(jax.jit, static_argnums=0, static_argnames=("scan", "remat"))
def _logits(config, params, rows, **options):
    return head_logits(params, config, hidden_states(params, config, *rows, **options))


WIDTH = 29
"""Every row is padded to this, and a second row added, so that each model compiles once."""


def forward(config, params, tokens, segments=None, prefixes=None, positions=None, **options):
    """Logits of one or two rows; by default each is one sequence."""
    shape = np.shape(tokens)
    plain = (tokens, np.broadcast_to(np.arange(shape[1]), shape), np.ones(shape), np.zeros(shape))
    given = (tokens, positions, segments, prefixes)
    rows = np.zeros((4, 2, WIDTH), np.int32)
    for row, default, values in zip(rows, plain, given, strict=True):
        row[: shape[0], : shape[1]] = default if values is None else values
    return np.asarray(_logits(config, params, tuple(rows), **options))[: shape[0], : shape[1]]


def test_logits_are_those_of_transformers(model):
    ours = forward(model.config, model.params, model.tokens)
    print(f"max |dlogit| {np.abs(ours - model.logits).max():.1e}")
    np.testing.assert_allclose(ours, model.logits, atol=LOGIT_BOUND, rtol=0)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama-rope-llama3", {"rope_scaling": None}),
        ("llama-rope-linear", {"rope_scaling": None}),
        ("mistral", {"window": 6}),
        ("qwen2", {"qkv_bias": False}),
        ("qwen2-window", {"window_layers": (2,)}),
        ("qwen3", {"qk_norm": False}),
        ("gemma2", {"attn_softcap": None}),
        ("gemma2", {"final_softcap": None}),
        ("gemma2", {"query_dim": None}),
        ("gemma2", {"window_layers": (0,)}),
        ("gemma3", {"window_rope_theta": None}),
        ("gemma3", {"rope_scaling": None}),
        ("gemma3", {"norm_offset": 0.0}),
        ("gemma3", {"embed_scale": 1.0}),
        ("gemma3", {"post_norms": False}),
        ("gemma3", {"activation": "silu"}),
    ],
)
def test_the_stored_logits_notice_each_part(name, change, tmp_path_factory):
    model = golden(name, tmp_path_factory.getbasetemp())
    changed = forward(dataclasses.replace(model.config, **change), model.params, model.tokens)
    assert np.abs(changed - model.logits).max() > 100 * LOGIT_BOUND


@pytest.mark.parametrize("options", [{"scan": True}, {"remat": True}])
def test_scan_and_remat_change_nothing(options, tmp_path_factory):
    """With layers of two kinds; for one kind see test_transformer."""
    model = golden("gemma3", tmp_path_factory.getbasetemp())
    ours = forward(model.config, model.params, model.tokens, **options)
    np.testing.assert_allclose(ours, model.logits, atol=LOGIT_BOUND, rtol=0)


def test_packed_sequences_and_shared_prompts_are_isolated(family):
    """A prompt, two responses that branch from it, another sequence, padding: windows go by the
    position in a sequence, wherever the row holds it."""
    prompt, one, two, other = family.tokens[0, :7], *np.split(family.tokens[1], [6, 11])
    lengths = [len(part) for part in (prompt, one, two, other)]
    row = np.concatenate([prompt, one, two, other, [3, 3]])
    starts = (0, 7, 7, 0, 0)
    places = [s + i for s, n in zip(starts, (*lengths, 2), strict=True) for i in range(n)]
    segments = np.repeat([1, 2, 3, 4, 0], (*lengths, 2))
    prefixes = np.repeat([0, 1, 1, 0, 0], (*lengths, 2))
    packed = forward(family.config, family.params, [row], [segments], [prefixes], [places])[0]
    assert np.isfinite(packed).all()
    ends = np.cumsum(lengths)
    for alone, begin, end in (
        ([*prompt, *one], 7, ends[1]),
        ([*prompt, *two], ends[1], ends[2]),
        (other, ends[2], ends[3]),
    ):
        expected = forward(family.config, family.params, [alone])[0]
        np.testing.assert_allclose(
            packed[begin:end], expected[len(alone) - (end - begin) :], atol=LOGIT_BOUND
        )


def decode(family, dtype):
    """Continuations of two prompts by the engine: [(prompt, ids, log-probs)]."""
    engine = DecoderEngine(
        family.config, InferenceConfig(slots=3, max_len=24, prefill_tokens=32, dtype=dtype)
    )
    engine.update_params(engine.load_params(to_named(family.params)), 0)
    prompts = [family.tokens[0, :9], family.tokens[1, :6]]
    state = engine.init_decode_state()
    for slot, prefix in enumerate(engine.prefill_batch(prompts)):
        state = engine.insert(prefix, state, slot, SlotSampling(seed=slot, temperature=HOT))
    steps = []
    for _ in range(11):
        state, result = engine.generate(state)
        steps.append(result.convert_to_numpy())
    return [
        (
            prompt,
            np.array([step.tokens[slot] for step in steps]),
            np.array([step.raw_log_prob[slot] for step in steps]),
        )
        for slot, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-4), ("bfloat16", BF16_BOUND)])
def test_prefill_and_decode_equal_one_full_forward(family, dtype, bound):
    worst = 0.0
    for prompt, ids, logprobs in decode(family, dtype):
        row = forward(family.config, family.params, [[*prompt, *ids]])[0]
        every = jax.nn.log_softmax(row / HOT)
        at = np.arange(len(prompt) - 1, len(prompt) - 1 + len(ids))
        worst = max(worst, np.abs(np.asarray(every)[at, ids] - logprobs).max())
    print(f"max |dlogp| {dtype} {worst:.1e}")
    assert worst < bound


def test_one_step_of_the_trainer_reaches_every_parameter(family):
    settings = StepSettings(model=family.config, objective=Grpo(), optimizer=OptimizerConfig())
    batch = pack(make_sequences(7, 4, 4), PackingConfig(row_tokens=64), denominator=30.0, step=1)
    params = jax.tree.map(jnp.copy, family.params)
    state, metrics = build_train_step(settings)(
        new_state(params, build_optimizer(settings.optimizer), 0), batch
    )
    assert np.isfinite(float(metrics.loss))
    for (path, before), after in zip(
        jax.tree_util.tree_leaves_with_path(family.params),
        jax.tree.leaves(state.params),
        strict=True,
    ):
        name = jax.tree_util.keystr(path)
        assert np.isfinite(after).all(), name
        assert (np.asarray(before) != after).any(), name


def test_fresh_parameters_have_the_shapes_and_scale_by_one(model):
    fresh = jax.jit(functools.partial(init_params, model.config))(jax.random.key(0))
    assert jax.tree.map(jnp.shape, fresh) == jax.tree.map(jnp.shape, model.params)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(fresh)} == {"float32"}
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(fresh))
    scale = np.asarray(fresh["norm"]) + model.config.norm_offset
    np.testing.assert_array_equal(scale, 1)
    assert count_params(model.config) == count_parameters(model.config)[0]


def test_a_window_must_have_a_size():
    with pytest.raises(ValueError, match="window = None must be positive"):
        ModelConfig(
            layers=1, dim=8, heads=1, kv_heads=1, head_dim=8, ffn=8, vocab=8, window_layers=(0,)
        )
