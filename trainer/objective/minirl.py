"""MiniRL (Qwen, 2512.01374): the first-order approximation of the sequence objective, masked.

    IS = M min(pi_theta / mu, cap),  Term1 = log pi_theta
    M = 0 where A > 0 and pi_theta / pi_old > 1 + high, or A < 0 and pi_theta / pi_old < 1 - low

The paper uses low 0.2, high 0.27, cap 5, and no length normalisation.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from trainer.objective.policy_loss import Slots, Tokens, ratio


@dataclass(frozen=True, kw_only=True)
class MiniRl:
    clip_low: float = 0.2
    clip_high: float = 0.27
    cap: float = 5.0

    def slots(self, tokens: Tokens) -> Slots:
        r, advantages = ratio(tokens.theta, tokens.old), tokens.advantages
        masked = jnp.where(advantages > 0, r > 1 + self.clip_high, r < 1 - self.clip_low)
        masked &= advantages != 0
        weight = ratio(tokens.theta, tokens.behaviour)
        importance = jnp.where(masked, 0.0, jnp.minimum(weight, self.cap))
        return Slots(importance, tokens.theta, 0.0, masked | (weight > self.cap))
