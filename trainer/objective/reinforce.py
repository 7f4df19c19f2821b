"""REINFORCE: Term1 = log pi_theta, and the ratio to pi_old that one chooses.

``none``      IS = 1: the simplest reference; with ``rloo`` advantages RLOO (2402.14740); with every
              advantage 1 maximum likelihood.
``token``     IS = pi_theta / pi_old of the token.
``sequence``  IS = that of the whole response, RLAX's instance (2512.06392).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp

from trainer.objective.policy_loss import Slots, Tokens, ratio, sequence_sum


@dataclass(frozen=True, kw_only=True)
class Reinforce:
    importance: Literal["none", "token", "sequence"] = "none"

    def slots(self, tokens: Tokens) -> Slots:
        weight = jnp.ones_like(tokens.theta)
        if self.importance == "token":
            weight = ratio(tokens.theta, tokens.old)
        elif self.importance == "sequence":
            weight = ratio(sequence_sum(tokens.theta - tokens.old, tokens), 0.0)
        return Slots(weight, tokens.theta, 0.0, jnp.zeros(tokens.mask.shape, bool))
