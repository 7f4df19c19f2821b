"""Preferences: the advantages are the exact gradients of the published losses."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.trainer.sequences import make_sequences
from trainer.objective.config import ObjectiveConfig
from trainer.preference import dpo, kto, preference_advantages

REWARDS = {
    (0, 0): 1.0,
    (0, 1): 0.0,
    (0, 2): 0.5,
    (0, 3): 0.5,
    (1, 0): 1.0,
    (1, 1): 1.0,
    (2, 0): 0.2,
    (2, 1): 0.9,
}
KEYS = list(REWARDS)


@pytest.fixture
def margins():
    return dict(zip(KEYS, np.random.default_rng(0).normal(0, 3, len(KEYS)), strict=True))


def slopes(loss, margins):
    """-dL/dd of every response."""
    gradient = jax.grad(loss)(jnp.array([margins[k] for k in KEYS]))
    return dict(zip(KEYS, -np.asarray(gradient), strict=True))


def test_dpo_is_the_gradient_of_minus_log_sigmoid(margins):
    """Pairs: best with worst while they differ; equal rewards teach nothing."""
    pairs = [(0, 1), (7, 6)]

    def loss(d):
        return -jnp.mean(jnp.array([jax.nn.log_sigmoid(0.3 * (d[w] - d[l])) for w, l in pairs]))

    values, facts = dpo(KEYS, margins, REWARDS, 0.3)
    for key, slope in slopes(loss, margins).items():
        np.testing.assert_allclose(values.get(key, 0.0), slope, atol=1e-6)
    assert facts["pairs"] == 2
    np.testing.assert_allclose(
        facts["loss"], loss(jnp.array([margins[k] for k in KEYS])), rtol=1e-5
    )


def test_kto_is_the_gradient_of_its_value_function(margins):
    """z0 is the batch's KL, at least 0, and is not differentiated."""
    good = np.array([REWARDS[k] > 0.6 for k in KEYS])
    z0 = max(0.0, float(np.mean([margins[k] for k in KEYS])))

    def loss(d):
        value = jnp.where(good, jax.nn.sigmoid(0.3 * (d - z0)), jax.nn.sigmoid(0.3 * (z0 - d)))
        weight = jnp.where(good, good.size / (2 * good.sum()), good.size / (2 * (~good).sum()))
        return jnp.mean(weight * (1 - value))

    values, facts = kto(margins, REWARDS, 0.3, 0.6)
    for key, slope in slopes(loss, margins).items():
        np.testing.assert_allclose(values[key], slope, atol=1e-6)
    assert facts["kl_batch"] == z0


def test_nothing_to_prefer_is_no_gradient():
    flat = dict.fromkeys(KEYS, 1.0)
    values, facts = dpo(KEYS, dict.fromkeys(KEYS, 0.0), flat, 0.1)
    assert (values, facts["pairs"]) == ({}, 0.0)


def test_all_of_one_kind_still_counts(margins):
    values, _ = kto(margins, dict.fromkeys(KEYS, 1.0), 0.1, 0.0)
    assert all(v > 0 for v in values.values())


def test_a_response_sums_its_trainable_tokens_only():
    """NaN where nothing is trained, as ``scatter`` leaves it, is never read."""
    group = make_sequences(3, 1, 4)
    assert len(group) > 1
    values = [[np.where(s.loss_mask, -0.5, np.nan) for s in group]]
    for name in ("dpo", "kto"):
        found, facts = preference_advantages([group], ObjectiveConfig(name=name), values, values)
        assert all(np.isfinite(v).all() for v in found[0])
        assert np.isfinite(list(facts.values())).all()
