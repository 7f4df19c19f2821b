"""SAPO (2511.20347): a smooth gate in place of the clip.

    f(r) = (4 / tau) sigmoid(tau (r - 1)) A,  tau by the sign of A

IS = r f'(r) = 4 r p (1 - p) with p = sigmoid(tau (r - 1)): 1 at r = 1, falling off on both sides.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from trainer.objective.policy_loss import Slots, Tokens, ratio


@dataclass(frozen=True, kw_only=True)
class Sapo:
    tau_positive: float = 1.0
    tau_negative: float = 1.05

    def slots(self, tokens: Tokens) -> Slots:
        r = ratio(tokens.theta, tokens.old)
        tau = jnp.where(tokens.advantages > 0, self.tau_positive, self.tau_negative)
        p = jax.nn.sigmoid(tau * (r - 1))
        return Slots(4 * r * p * (1 - p), tokens.theta, 0.0, jnp.zeros(tokens.mask.shape, bool))
