"""GMPO (2507.20673): the geometric mean of clipped token ratios, so that outliers weigh little.

    [prod_t rho_t]^(1/T) A,  log rho_t = log r_t clipped to [-low, high] where PPO would clip it

PPO clips from above for A > 0, from below for A < 0; a clipped token has no gradient of its own but
stays in the product. With Agg = 1/(G T): IS = [prod rho]^(1/T) M. Published bounds: 0.4 on the log.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from trainer.objective.policy_loss import Slots, Tokens, ratio, sequence_mean


@dataclass(frozen=True, kw_only=True)
class Gmpo:
    clip_low: float = 0.4
    clip_high: float = 0.4

    def slots(self, tokens: Tokens) -> Slots:
        log_ratio, positive = tokens.theta - tokens.old, tokens.advantages > 0
        bounded = jnp.where(
            positive,
            jnp.minimum(log_ratio, self.clip_high),
            jnp.maximum(log_ratio, -self.clip_low),
        )
        mean = ratio(sequence_mean(bounded, tokens), 0.0)
        clipped = (bounded != log_ratio) & (tokens.advantages != 0)
        return Slots(jnp.where(clipped, 0.0, mean), tokens.theta, 0.0, clipped)
