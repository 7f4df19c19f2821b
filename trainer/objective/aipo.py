"""AIPO (LlamaRL, 2505.24034): one ratio absorbs lag, quantisation and engine mismatch.

    IS = min(pi_theta / mu, rho),  Term1 = log pi_theta

mu is the policy that really sampled the token. The clip is one-sided: a token above rho keeps a
bounded gradient. The paper chose rho in [2, 10]. PipelineRL (2509.19128) is rho = 1 + its epsilon.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from trainer.objective.policy_loss import Slots, Tokens, ratio


@dataclass(frozen=True, kw_only=True)
class Aipo:
    cap: float = 5.0
    """rho"""

    def slots(self, tokens: Tokens) -> Slots:
        r = ratio(tokens.theta, tokens.behaviour)
        return Slots(jnp.minimum(r, self.cap), tokens.theta, 0.0, r > self.cap)
