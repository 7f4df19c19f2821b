"""The step: equal to the naive form however it is packed and cut, compiled once, frozen at lr 0."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.trainer.sequences import MODEL, make_sequences
from trainer.config import OptimizerConfig
from trainer.model.transformer import head_logits, hidden_states, init_params
from trainer.objective.composite import Composite
from trainer.objective.correction import BehaviourCorrection
from trainer.objective.grpo import Grpo
from trainer.objective.gspo import Gspo
from trainer.optimizer import build_optimizer, learning_rate
from trainer.packing import PackingConfig, gather, pack, scatter
from trainer.state import new_state
from trainer.step import StepSettings, accumulate, build_token_logprobs, build_train_step

SETTINGS = StepSettings(
    model=MODEL,
    objective=Composite(surrogate=Grpo(), correction=BehaviourCorrection(cap=2.0)),
    optimizer=OptimizerConfig(),
)
PACKINGS = {
    "one row": PackingConfig(row_tokens=128),
    "short rows": PackingConfig(row_tokens=16),
    "micro-batches": PackingConfig(row_tokens=16, micro_batch_tokens=32),
}


@functools.cache
def params():
    return jax.jit(lambda key: init_params(MODEL, key))(jax.random.key(1))


def one_sequence_per_row(sequences):
    """Padded rows without any sharing: prompt and response, everything else 0."""
    kept = [s for s in sequences if s.loss_mask.any()]
    length = max(s.prompt_ids.size + s.response_ids.size for s in kept)
    rows = np.zeros((4, len(kept), length))  # tokens, real, trainable (at the target), log mu
    for i, s in enumerate(kept):
        p, end = s.prompt_ids.size, s.prompt_ids.size + s.response_ids.size
        rows[0, i, :end] = [*s.prompt_ids, *s.response_ids]
        rows[1, i, :end] = 1
        rows[2, i, p:end] = s.loss_mask
        rows[3, i, p:end] = s.raw_logprobs
    return kept, rows


def naive(sequences, denominator):
    """Every sequence in a row of its own, full logits, loss by the definition."""
    kept, (tokens, real, trainable, mu) = one_sequence_per_row(sequences)
    ids, real = tokens.astype(np.int32), real.astype(np.int32)
    temperature, advantage, scale = (
        np.array([getattr(s, name) for s in kept], np.float32)[:, None]
        for name in ("temperature", "advantage", "scale")
    )

    def loss(params):
        places = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
        hidden = hidden_states(params, MODEL, ids, places, real, 0 * real)
        logits = head_logits(params, MODEL, hidden)[:, :-1] / temperature[:, :, None]
        every = jax.nn.log_softmax(logits)
        theta = jnp.take_along_axis(every, ids[:, 1:, None], axis=-1)[..., 0]
        weight = jnp.minimum(jnp.exp(jax.lax.stop_gradient(theta) - mu[:, 1:]), 2.0)
        return -jnp.sum(trainable[:, 1:] * weight * advantage * scale * theta) / denominator

    return jax.jit(jax.value_and_grad(loss))(params())


@functools.cache
def jitted_gradients(settings):
    return jax.jit(lambda p, b: accumulate(p, b, settings))


def gradients(batch, settings=SETTINGS):
    return jitted_gradients(settings)(params(), batch)


def assert_close(a, b, atol=1e-5):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, atol=atol)


def test_loss_and_gradient_are_those_of_one_sequence_per_row():
    """However the sequences are packed and cut into micro-batches."""
    sequences = make_sequences(7, 4, 4)
    loss, expected = naive(sequences, 30.0)
    for name, config in PACKINGS.items():
        batch = pack(sequences, config, denominator=30.0, step=1)
        assert (batch.micro_batches > 1) == (name == "micro-batches")
        got, sums, _ = gradients(batch)
        np.testing.assert_allclose(sums.loss, loss, atol=1e-5)
        assert_close(got, expected)


SEQUENCE_LEVEL = dataclasses.replace(
    SETTINGS,
    objective=Composite(
        surrogate=Gspo(clip_low=0.05, clip_high=0.05),
        correction=BehaviourCorrection(level="sequence", cap=2.0),
        off_policy_delta=0.1,
        entropy_coef=0.1,
    ),
    entropy=True,
)


def test_what_is_said_of_whole_sequences_does_not_depend_on_rows_either():
    """Ratios of sequences, and the entropy of the whole distribution."""
    sequences, found = make_sequences(7, 4, 4), []
    for config in PACKINGS.values():
        batch = pack(sequences, config, denominator=30.0, step=1)
        shifted = [s.raw_logprobs + 0.1 for s in sequences]
        batch = batch.replace(old_logprobs=gather(batch, shifted), on_policy=np.bool_(False))
        found.append(gradients(batch, SEQUENCE_LEVEL)[:2])
    assert float(found[0][1].clipped) > 0
    for other in found[1:]:
        assert_close(found[0], other)


def test_chunks_of_the_head_change_nothing():
    batch = pack(make_sequences(7, 4, 4), PACKINGS["short rows"], denominator=30.0, step=1)
    whole, _, _ = gradients(batch)
    pieces, _, _ = gradients(batch, dataclasses.replace(SETTINGS, head_tokens=7, remat=True))
    assert_close(whole, pieces, atol=1e-6)


def test_garbage_in_padding_changes_no_bit():
    batch = pack(make_sequences(2, 4, 4), PACKINGS["micro-batches"], denominator=30.0, step=1)
    mask = batch.loss_mask
    names = ("raw_logprobs", "behaviour_logprobs", "old_logprobs", "advantages", "scales")
    names += ("reference_logprobs",)
    poison = {n: np.where(mask, getattr(batch, n), np.nan) for n in names}
    poison["targets"] = np.where(mask, batch.targets, 3)
    poison["tokens"] = np.where(batch.segments > 0, batch.tokens, 5)
    clean, poisoned = gradients(batch), gradients(batch.replace(**poison))
    for x, y in zip(jax.tree.leaves(clean), jax.tree.leaves(poisoned), strict=True):
        np.testing.assert_array_equal(x, y)


def test_old_logprobs_come_from_the_same_graph():
    """Recomputed log-probs of unchanged parameters give ratio one: nothing clips, same gradient."""
    sequences = make_sequences(5, 4, 4)
    batch = pack(sequences, PACKINGS["short rows"], denominator=30.0, step=1)
    old = build_token_logprobs(SETTINGS)(params(), batch)
    apart = batch.replace(old_logprobs=old, on_policy=np.bool_(False))
    assert_close(gradients(batch), gradients(apart), atol=1e-6)
    for s, values in zip(sequences, scatter(batch, np.asarray(old), sequences), strict=True):
        assert (values[s.loss_mask] < 0).all()


def fresh_state(config):
    copied = jax.tree.map(jnp.copy, params())
    return new_state(copied, build_optimizer(config), 0)


def test_compiles_once_and_counts():
    step = build_train_step(SETTINGS)
    state = fresh_state(SETTINGS.optimizer)
    sequences = make_sequences(4, 4, 4)
    for i in range(1, 4):
        changed = [dataclasses.replace(s, advantage=s.advantage + i) for s in sequences]
        batch = pack(changed, PACKINGS["micro-batches"], denominator=30.0, step=i)
        state, metrics = step(state, batch)
    assert step._cache_size() == 1
    assert (int(state.step), int(state.optimizer_step)) == (3, 3)
    assert metrics.tokens == sum(s.trainable_tokens for s in sequences)


def test_more_micro_batches_share_a_compilation():
    """Seven and eight micro-batches: one shape, two trip counts."""
    step = build_train_step(SETTINGS)
    state = fresh_state(SETTINGS.optimizer)
    full = pack(make_sequences(7, 8, 1, prompt=12), PackingConfig(row_tokens=16,
        micro_batch_tokens=16), denominator=30.0, step=1)  # fmt: skip
    for real in (full.micro_batches - 1, full.micro_batches):
        state, _ = step(state, full.replace(micro_batches=np.int32(real)))
    assert full.micro_batches > 2
    assert step._cache_size() == 1


def test_learning_rate_zero_changes_no_bit():
    """The canary: whatever moves at lr 0 is a bug (field.md A.7)."""
    settings = dataclasses.replace(SETTINGS, optimizer=OptimizerConfig(lr=0.0))
    step, state = build_train_step(settings), fresh_state(settings.optimizer)
    sequences = make_sequences(4, 4, 4)
    for i in range(1, 4):
        batch = pack(sequences, PACKINGS["micro-batches"], denominator=9.0, step=i)
        state, _ = step(state, batch)
    for x, y in zip(jax.tree.leaves(state.params), jax.tree.leaves(params()), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    ("step", "expected"),
    [(1, 0.2), (4, 0.8), (5, 1.0), (6, 1.0), (30, 0.525), (55, 0.05), (1000, 0.05)],
)
def test_learning_rate_is_a_function_of_the_step(step, expected):
    cosine = OptimizerConfig(lr=1.0, schedule="cosine", warmup_steps=5, decay_steps=55)
    tolerance = 2e-3 if step == 6 else 1e-6
    assert abs(float(learning_rate(cosine, step)) - expected) < tolerance


def test_a_line_ends_where_the_cosine_does():
    line = OptimizerConfig(lr=1.0, schedule="linear", warmup_steps=5, decay_steps=55)
    rates = [float(learning_rate(line, s)) for s in (1, 5, 30, 55, 1000)]
    np.testing.assert_allclose(rates, [0.2, 1.0, 0.525, 0.05, 0.05], atol=1e-6)


def test_muon_orthogonalises_the_layers_matrices_and_nothing_else():
    muon, adam = (
        build_optimizer(OptimizerConfig(name=name, clip_norm=0.0)) for name in ("muon", "adamw")
    )
    keys = iter(jax.random.split(jax.random.key(3), 100))
    noise = jax.tree.map(lambda p: jax.random.normal(next(keys), p.shape), params())
    update, _ = jax.jit(muon.update)(noise, muon.init(params()), params())
    plain, _ = jax.jit(adam.update)(noise, adam.init(params()), params())
    for path, u in jax.tree_util.tree_leaves_with_path(update):
        if path[0].key == "layers" and u.ndim == 2:
            singular = np.linalg.svd(u, compute_uv=False) / (0.2 * max(u.shape) ** 0.5)
            assert 0.5 < singular.min() < singular.max() < 1.3
        else:
            expected = plain
            for key in path:
                expected = expected[getattr(key, "key", getattr(key, "idx", None))]
            np.testing.assert_array_equal(u, expected)


def test_clipping_and_weight_decay():
    config = OptimizerConfig(clip_norm=1.0, weight_decay=0.5)
    optimizer = build_optimizer(config)
    tree = {"matrix": jnp.full((2, 2), 4.0), "norm": jnp.full(2, 4.0)}
    zero = jax.tree.map(jnp.zeros_like, tree)
    updates, _ = optimizer.update(zero, optimizer.init(tree), tree)
    np.testing.assert_allclose(updates["matrix"], 2.0)
    np.testing.assert_allclose(updates["norm"], 0.0)
