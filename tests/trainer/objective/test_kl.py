"""Estimators of the KL on a toy distribution, where every expectation is a sum."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trainer.objective.kl import kl_estimate

LOGITS = jnp.array([0.3, -1.0, 0.7, 0.1])
REFERENCE = jax.nn.log_softmax(jnp.array([1.0, 0.2, -0.5, 0.0]))


def exact(logits):
    p = jax.nn.log_softmax(logits)
    return jnp.sum(jnp.exp(p) * (p - REFERENCE))


def expected(estimator, logits):
    """E over tokens sampled from the policy, whose probabilities are not differentiated."""
    p = jax.nn.log_softmax(logits)
    return jnp.sum(jax.lax.stop_gradient(jnp.exp(p)) * kl_estimate(estimator, p, REFERENCE))


@pytest.mark.parametrize("estimator", ["k1", "k3", "k3+"])
def test_the_value_is_that_of_the_kl_on_average(estimator):
    np.testing.assert_allclose(expected(estimator, LOGITS), exact(LOGITS), rtol=1e-5)


@pytest.mark.parametrize("estimator", ["k2", "k3+"])
def test_the_gradient_is_that_of_the_kl(estimator):
    got = jax.grad(lambda x: expected(estimator, x))(LOGITS)
    np.testing.assert_allclose(got, jax.grad(exact)(LOGITS), atol=1e-6)


def test_k1_has_no_gradient_on_average_and_k3_that_of_the_other_direction():
    np.testing.assert_allclose(jax.grad(lambda x: expected("k1", x))(LOGITS), 0, atol=1e-6)

    def backward(logits):
        return jnp.sum(jnp.exp(REFERENCE) * (REFERENCE - jax.nn.log_softmax(logits)))

    got = jax.grad(lambda x: expected("k3", x))(LOGITS)
    np.testing.assert_allclose(got, jax.grad(backward)(LOGITS), atol=1e-6)


def test_k1_in_the_reward_has_the_gradient_of_the_kl():
    """REINFORCE with reward -(log pi - log ref)."""

    def objective(logits):
        p = jax.nn.log_softmax(logits)
        reward = -kl_estimate("k1", p, REFERENCE)
        return -jnp.sum(jax.lax.stop_gradient(jnp.exp(p) * reward) * p)

    np.testing.assert_allclose(jax.grad(objective)(LOGITS), jax.grad(exact)(LOGITS), atol=1e-6)


def test_weighted_by_the_ratio_it_is_the_unbiased_one_of_deepseek():
    """grad of r * k3 with r differentiated equals r times the gradient of k3+."""
    mu = jax.nn.log_softmax(jnp.array([0.0, 0.5, 0.2, -0.3]))

    def published(logits):
        p = jax.nn.log_softmax(logits)
        r = jnp.exp(p - mu)
        return jnp.sum(jnp.exp(mu) * r * kl_estimate("k3", p, REFERENCE))

    def ours(logits):
        p = jax.nn.log_softmax(logits)
        r = jax.lax.stop_gradient(jnp.exp(p - mu))
        return jnp.sum(jnp.exp(mu) * r * kl_estimate("k3+", p, REFERENCE))

    np.testing.assert_allclose(jax.grad(ours)(LOGITS), jax.grad(published)(LOGITS), atol=1e-6)
    np.testing.assert_allclose(jax.grad(ours)(LOGITS), jax.grad(exact)(LOGITS), atol=1e-6)


def test_far_apart_it_stays_finite():
    for estimator in ("k1", "k2", "k3", "k3+"):
        assert np.isfinite(kl_estimate(estimator, jnp.float32(-1e4), jnp.float32(-1.0)))
