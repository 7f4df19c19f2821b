"""The published losses, written out token by token in float64: the numpy twins.

Each takes the tokens with theta replaced and gives the loss, with its stop-gradients frozen at
``t`` (the first argument): finite differences of it are the gradient the paper means.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.trainer.objective.sampled_tokens import DENOMINATOR
from trainer.objective.policy_loss import Tokens

Loss = Callable[[Tokens, np.ndarray], float]


def ratio(a, b):
    return np.exp(np.clip(a - b, -20, 20))


def agg(t: Tokens) -> np.ndarray:
    return np.where(t.mask, t.scales, 0.0) / DENOMINATOR


def rows(t: Tokens, values: np.ndarray, how=np.mean) -> np.ndarray:
    """``how`` over each sequence's trainable tokens, at each of its tokens."""
    out = np.zeros(values.shape)
    for i, mask in enumerate(t.mask):
        out[i] = how(values[i][mask]) if mask.any() else 0.0
    return out


def ppo(low=0.2, high=0.2, dual=None) -> Loss:
    """-min(r A, clip(r) A), for A < 0 at least dual * A."""

    def loss(t, theta):
        r = ratio(theta, t.old)
        best = np.minimum(r * t.advantages, np.clip(r, 1 - low, 1 + high) * t.advantages)
        if dual is not None:
            best = np.where(t.advantages < 0, np.maximum(best, dual * t.advantages), best)
        return -np.sum(agg(t) * best)

    return loss


def cispo(cap: float) -> Loss:
    """-sg[min(r, cap)] A log pi"""
    return lambda t, theta: (
        -np.sum(agg(t) * np.minimum(ratio(t.theta, t.old), cap) * t.advantages * theta)
    )


def aipo(rho: float) -> Loss:
    """-sg[min(pi / mu, rho)] A log pi"""
    return lambda t, theta: (
        -np.sum(agg(t) * np.minimum(ratio(t.theta, t.behaviour), rho) * t.advantages * theta)
    )


def gspo(low: float, high: float) -> Loss:
    """-min(s A, clip(s) A) with s the geometric mean ratio: once a sequence, 1/T at each token."""

    def loss(t, theta):
        s = np.exp(rows(t, theta - t.old))
        best = np.minimum(s * t.advantages, np.clip(s, 1 - low, 1 + high) * t.advantages)
        return -np.sum(sequence_agg(t) * best)

    return loss


def gmpo(bound: float) -> Loss:
    """-[prod rho]^(1/T) A, each factor clipped in PPO's way."""

    def loss(t, theta):
        x = theta - t.old
        clipped = np.clip(x, -bound, bound)
        signed = np.sign(t.advantages)
        chosen = np.where(signed * x <= signed * clipped, x, clipped)
        return -np.sum(sequence_agg(t) * np.exp(rows(t, chosen)) * t.advantages)

    return loss


def sequence_agg(t: Tokens) -> np.ndarray:
    """Agg of one number per sequence: Agg of the tokens must be equal within it."""
    return agg(t)


def reinforce(level: str) -> Loss:
    """-sg[r] A log pi, r of the token, of the sequence, or 1"""

    def loss(t, theta):
        x = t.theta - t.old
        r = {"none": 1.0, "token": np.exp(x), "sequence": np.exp(rows(t, x, np.sum))}[level]
        return -np.sum(agg(t) * r * t.advantages * theta)

    return loss


def dppo(low: float, high: float, quadratic: float) -> Loss:
    """-M A pi / mu + tau (log pi / mu)^2, M by the difference of probabilities"""

    def loss(t, theta):
        moved = np.exp(t.theta) - np.exp(t.behaviour)
        keep = ~np.where(t.advantages > 0, moved > high, moved < -low)
        r = ratio(theta, t.behaviour)
        value = quadratic * (theta - t.behaviour) ** 2 - keep * t.advantages * r
        return np.sum(agg(t) * value)

    return loss


def minirl(low: float, high: float, cap: float) -> Loss:
    """-M sg[min(pi / mu, cap)] A log pi"""

    def loss(t, theta):
        r = ratio(t.theta, t.old)
        keep = ~np.where(t.advantages > 0, r > 1 + high, r < 1 - low)
        weight = np.minimum(ratio(t.theta, t.behaviour), cap)
        return -np.sum(agg(t) * keep * weight * t.advantages * theta)

    return loss


def sapo(positive: float, negative: float) -> Loss:
    """-(4 / tau) sigmoid(tau (r - 1)) A"""

    def loss(t, theta):
        tau = np.where(t.advantages > 0, positive, negative)
        gate = 4 / tau / (1 + np.exp(-tau * (ratio(theta, t.old) - 1)))
        return -np.sum(agg(t) * gate * t.advantages)

    return loss


def corrected(loss: Loss, weight: Callable[[Tokens], np.ndarray]) -> Loss:
    """Another loss with its terms weighted by a function of pi_old / mu."""
    return lambda t, theta: loss(t._replace(scales=t.scales * weight(t)), theta)
