"""DPPO with binary total variation (2602.04879), prime-rl's default: trust by probability moved.

    -M r A + tau (log r)^2,  r = pi_theta / mu
    M = 0 where A > 0 and pi_theta - mu > high, or A < 0 and pi_theta - mu < -low

A ratio says little about rare tokens: 1e-6 -> 1e-5 is tenfold and harmless. The difference of
probabilities bounds the total variation that the token contributes.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from trainer.objective.policy_loss import Slots, Tokens, ratio


@dataclass(frozen=True, kw_only=True)
class Dppo:
    clip_low: float = 0.2
    clip_high: float = 0.2
    quadratic: float = 1e-3
    """tau"""

    def slots(self, tokens: Tokens) -> Slots:
        moved = jnp.exp(tokens.theta) - jnp.exp(tokens.behaviour)
        advantages = tokens.advantages
        clipped = jnp.where(advantages > 0, moved > self.clip_high, moved < -self.clip_low)
        clipped &= advantages != 0
        importance = jnp.where(clipped, 0.0, ratio(tokens.theta, tokens.behaviour))
        square = -self.quadratic * (tokens.theta - tokens.behaviour) ** 2
        return Slots(importance, tokens.theta, 0.0, clipped, square)
