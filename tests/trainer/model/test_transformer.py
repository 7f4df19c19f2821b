"""The decoder: masks, shared prefixes, options, parameter names. Reference values: see smollm2."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infra.contracts.errors import ConfigError
from trainer.model.attention import attention_mask
from trainer.model.config import ModelConfig, RopeScaling, preset
from trainer.model.params_io import count_params, from_named, named_leaves, to_named
from trainer.model.rope import rope_tables
from trainer.model.transformer import (
    head_logits,
    hidden_states,
    init_params,
    partition_specs,
)

TINY = preset("tiny")
FULL = ModelConfig(
    layers=2, dim=32, heads=4, kv_heads=2, head_dim=8, ffn=48, vocab=20, tied=False,
    qkv_bias=True, qk_norm=True, max_len=64,
)  # fmt: skip
"""Every optional part at once."""


@functools.partial(jax.jit, static_argnums=0)
def draw(config, seed):
    return init_params(config, jax.random.key(seed))


@pytest.fixture(scope="module", params=["tiny", "full"])
def model(request):
    config = TINY if request.param == "tiny" else FULL
    return config, draw(config, 3)


LENGTH = 24
"""Every row is padded to this, so that each model compiles once."""


@functools.partial(jax.jit, static_argnums=0, static_argnames=("scan", "remat"))
def logits(config, params, rows, **options):
    return head_logits(params, config, hidden_states(params, config, *rows, **options))


def padded(rows):
    return jnp.asarray([list(row) + [0] * (LENGTH - len(row)) for row in rows], jnp.int32)


def forward(model, tokens, positions=None, segments=None, prefixes=None, **options):
    """Logits of padded rows; by default each row is one sequence."""
    config, params = model
    positions = [range(len(row)) for row in tokens] if positions is None else positions
    segments = [[1] * len(row) for row in tokens] if segments is None else segments
    prefixes = [[0] * len(row) for row in tokens] if prefixes is None else prefixes
    rows = tuple(padded(part) for part in (tokens, positions, segments, prefixes))
    return np.asarray(logits(config, params, rows, **options))


@pytest.mark.parametrize(
    "options", [{"scan": True}, {"remat": True}, {"scan": True, "remat": True}]
)
def test_scan_and_remat_change_nothing(model, options):
    tokens = [np.arange(10) % 13]
    np.testing.assert_allclose(forward(model, tokens), forward(model, tokens, **options), atol=2e-5)


def test_a_later_token_never_changes_an_earlier_one(model):
    a, b = [[1, 2, 3, 4, 5, 6, 7, 8]], [[1, 2, 3, 4, 5, 12, 7, 8]]
    first, second = forward(model, a), forward(model, b)
    np.testing.assert_array_equal(first[0, :5], second[0, :5])
    assert np.abs(first[0, 5:8] - second[0, 5:8]).max() > 1e-3


def test_responses_that_share_a_prompt_equal_separate_sequences(model):
    prompt, answers = [1, 2, 3, 4], [[5, 6, 7], [8, 9], [5, 6, 1, 2]]
    row, positions, segments, prefixes = list(prompt), list(range(4)), [1] * 4, [0] * 4
    for i, answer in enumerate(answers):
        row += answer
        positions += range(4, 4 + len(answer))
        segments += [i + 2] * len(answer)
        prefixes += [1] * len(answer)
    packed = forward(model, [row], [positions], [segments], [prefixes])
    start = 4
    for answer in answers:
        alone = forward(model, [prompt + answer])
        end = start + len(answer)
        np.testing.assert_allclose(packed[0, :4], alone[0, :4], atol=2e-5)
        np.testing.assert_allclose(packed[0, start:end], alone[0, 4 : end - start + 4], atol=2e-5)
        start = end


def test_packed_sequences_do_not_see_each_other_and_padding_is_finite(model):
    out = forward(model, [[1, 2, 3, 4, 5, 6]], [[0, 1, 2, 0, 1, 2]], [[1, 1, 1, 2, 2, 2]])
    np.testing.assert_allclose(out[0, 3:6], forward(model, [[4, 5, 6]])[0, :3], atol=2e-5)
    assert np.isfinite(out).all()


def test_rubbish_in_padding_changes_nothing_and_gets_no_gradient(model):
    config, params = model
    segments = jnp.array([[1, 1, 1, 0, 0]])
    row = (jnp.array([[0, 1, 2, 0, 0]]), segments, jnp.zeros_like(segments))

    @jax.jit
    @jax.grad
    def gradient(params, tokens):
        hidden = hidden_states(params, config, tokens, *row)
        return jnp.where(segments[..., None] != 0, head_logits(params, config, hidden), 0).sum()

    clean = gradient(params, jnp.array([[1, 2, 3, 0, 0]]))
    dirty = gradient(params, jnp.array([[1, 2, 3, 7, 11]]))
    for a, b in zip(jax.tree.leaves(clean), jax.tree.leaves(dirty), strict=True):
        np.testing.assert_array_equal(a, b)
        assert np.isfinite(a).all()


def test_attention_mask_by_hand():
    # a prompt (1), two responses to it (2, 3), padding (0)
    mask = attention_mask(jnp.array([[1, 2, 2, 3, 0]]), jnp.array([[0, 1, 1, 1, 0]]))[0]
    expected = [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 0, 0, 1, 0],
        [0, 0, 0, 0, 0],
    ]
    np.testing.assert_array_equal(mask, np.array(expected, bool))


def test_llama3_scaling_keeps_fast_frequencies_and_stretches_slow_ones():
    scaling = RopeScaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_len=8192
    )
    base = ModelConfig(
        layers=1, dim=8, heads=1, kv_heads=1, head_dim=64, ffn=8, vocab=8, rope_theta=5e5
    )
    scaled = ModelConfig(
        layers=1, dim=8, heads=1, kv_heads=1, head_dim=64, ffn=8, vocab=8, rope_theta=5e5,
        rope_scaling=scaling,
    )  # fmt: skip
    positions = jnp.array([1])
    plain = np.arcsin(rope_tables(base, positions)[1][0])
    ratio = np.arcsin(rope_tables(scaled, positions)[1][0]) / plain
    assert ratio[0] == pytest.approx(1.0)
    assert ratio[-1] == pytest.approx(1 / 8, rel=1e-3)
    assert (np.diff(ratio) < 1e-3).all()


def test_named_arrays_round_trip_without_copy(model):
    config, params = model
    named = to_named(params)
    again = from_named(config, named)
    for (name, a), (_, b) in zip(named_leaves(params), named_leaves(again), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=name)
    leaf = params["layers"][0]["q"]
    view = named["model.layers.0.self_attn.q_proj.weight"]
    assert view.ctypes.data == leaf.unsafe_buffer_pointer()


def test_from_named_never_aliases_the_callers_memory():
    named = to_named(draw(TINY, 0))
    for offset in (0, 4):  # device_put likes to keep memory that is aligned to 64 bytes
        arrays = {}
        for name, array in named.items():
            memory = np.zeros(array.nbytes + 128, np.uint8)
            start = -memory.ctypes.data % 64 + offset
            arrays[name] = memory[start : start + array.nbytes].view(np.float32)
            arrays[name] = arrays[name].reshape(array.shape)
            arrays[name][:] = array
        params = jax.block_until_ready(from_named(TINY, arrays))
        for array in arrays.values():
            array[:] = 7
        for name, leaf in named_leaves(params):
            np.testing.assert_array_equal(leaf, named[name], err_msg=name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda n: n.pop("model.norm.weight"), "model.norm.weight is missing"),
        (lambda n: n.update({"model.norm.weight": np.zeros(3)}), "is (3,), the model needs (96,)"),
        (lambda n: n.update({"extra": np.zeros(3)}), "extra is not part of this model"),
    ],
)
def test_wrong_arrays_are_named(change, message):
    named = to_named(draw(TINY, 0))
    change(named)
    with pytest.raises(ConfigError, match=message.replace("(", r"\(").replace(")", r"\)")):
        from_named(TINY, named)


def test_tiny_has_the_size_it_promises():
    assert 0.3e6 < count_params(TINY) < 0.36e6


def test_partition_specs_match_the_parameters(model):
    config, params = model
    specs = partition_specs(config)
    assert jax.tree.structure(jax.tree.map(lambda _: 0, params)) == jax.tree.structure(
        jax.tree.map(lambda _: 0, specs)
    )
