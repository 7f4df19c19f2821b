"""AIPO (LlamaRL, 2505.24034): one ratio absorbs lag, quantisation and engine mismatch.

    IS = min(pi_theta / mu, rho),  Term1 = log pi_theta

mu is the policy that really sampled the token. The clip is one-sided: a token above rho keeps a
bounded gradient. The paper chose rho in [2, 10].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from trainer.objective.policy_loss import Slots, TokenLogprobs, ratio


@dataclass(frozen=True, kw_only=True)
class Aipo:
    rho: float = 5.0

    def slots(self, logprobs: TokenLogprobs, advantages: Any) -> Slots:
        r = ratio(logprobs.theta, logprobs.behaviour)
        return Slots(jnp.minimum(r, self.rho), logprobs.theta, 0.0, r > self.rho)
