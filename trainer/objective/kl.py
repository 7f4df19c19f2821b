"""Estimators of KL(pi_theta || pi_ref) from the sampled token, d = log pi_ref - log pi_theta.

=====  =============  ==============================================================
k1     -d             unbiased; its gradient is zero on average, so for rewards only
k2     d^2 / 2        its gradient -d grad log pi is exactly that of the KL, on policy
k3     e^d - d - 1    low variance, never negative; its gradient is that of KL(ref || theta)
k3+    k3, grad k2    k3's value with k2's gradient
=====  =============  ==============================================================

(Schulman's note on approximating KL.) Under IS the gradient of k2 and k3+ is the off-policy one.
That of DeepSeek-V3.2's r * k3 (2512.02556), with r differentiated, is the same:
r (k3 + 1 - e^d) = -r d.
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp

from trainer.objective.policy_loss import MAX_LOG_RATIO

KlEstimator = Literal["k1", "k2", "k3", "k3+"]


def kl_estimate(estimator: KlEstimator, theta: Any, reference: Any) -> Any:
    """Per token, with the gradient of the table."""
    d = reference - theta
    if estimator == "k1":
        return -d
    square = d**2 / 2
    if estimator == "k2":
        return square
    k3 = jnp.expm1(jnp.clip(d, -MAX_LOG_RATIO, MAX_LOG_RATIO)) - d
    if estimator == "k3":
        return k3
    return jax.lax.stop_gradient(k3 - square) + square
