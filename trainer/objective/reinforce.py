"""REINFORCE per token: IS = 1 (times the behaviour correction), Term1 = log pi_theta.

The simplest reference; with ``rloo`` advantages it is RLOO (2402.14740).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from trainer.objective.grpo import behaviour_weight
from trainer.objective.policy_loss import Slots, TokenLogprobs


@dataclass(frozen=True, kw_only=True)
class Reinforce:
    behaviour_cap: float | None = None

    def slots(self, logprobs: TokenLogprobs, advantages: Any) -> Slots:
        weight, capped = behaviour_weight(logprobs, self.behaviour_cap)
        return Slots(jnp.ones_like(logprobs.theta) * weight, logprobs.theta, 0.0, capped)
