"""GSPO (Qwen, 2507.18071): the clipped surrogate on the sequence's ratio.

    s = (pi_theta(o) / pi_old(o))^(1/T);  min(s A, clip(s, 1 - low, 1 + high) A),  mean of sequences

grad s = s (1/T) sum_t grad log pi_t, so with Agg = 1/(G T) every token gets IS = s M. The published
bounds are narrow, 3e-4 and 4e-4: s is a geometric mean and moves little.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from trainer.objective.policy_loss import Slots, Tokens, ratio, sequence_mean


@dataclass(frozen=True, kw_only=True)
class Gspo:
    clip_low: float = 3e-4
    clip_high: float = 4e-4

    def slots(self, tokens: Tokens) -> Slots:
        s = ratio(sequence_mean(tokens.theta - tokens.old, tokens), 0.0)
        advantages = tokens.advantages
        clipped = jnp.where(advantages > 0, s > 1 + self.clip_high, s < 1 - self.clip_low)
        clipped &= advantages != 0
        return Slots(jnp.where(clipped, 0.0, s), tokens.theta, 0.0, clipped)
