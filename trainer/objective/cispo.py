"""CISPO (MiniMax-M1, 2506.13585; ScaleRL, 2510.13786): clip the weight, keep every token.

    IS = min(pi_theta / pi_old, cap),  Term1 = log pi_theta

No token loses its gradient, unlike GRPO's clip. With a behaviour correction IS is further
multiplied by min(pi_old / mu, behaviour cap).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from trainer.objective.grpo import behaviour_weight
from trainer.objective.policy_loss import Slots, TokenLogprobs, ratio


@dataclass(frozen=True, kw_only=True)
class Cispo:
    cap: float = 5.0
    behaviour_cap: float | None = None

    def slots(self, logprobs: TokenLogprobs, advantages: Any) -> Slots:
        r = ratio(logprobs.theta, logprobs.old)
        weight, capped = behaviour_weight(logprobs, self.behaviour_cap)
        importance = jnp.minimum(r, self.cap) * weight
        return Slots(importance, logprobs.theta, 0.0, (r > self.cap) | capped)
