"""CISPO (MiniMax-M1, 2506.13585; ScaleRL, 2510.13786): clip the weight, keep every token.

    IS = min(pi_theta / pi_old, cap),  Term1 = log pi_theta

No token loses its gradient, unlike GRPO's clip.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from trainer.objective.policy_loss import Slots, Tokens, ratio


@dataclass(frozen=True, kw_only=True)
class Cispo:
    cap: float = 5.0

    def slots(self, tokens: Tokens) -> Slots:
        r = ratio(tokens.theta, tokens.old)
        return Slots(jnp.minimum(r, self.cap), tokens.theta, 0.0, r > self.cap)
