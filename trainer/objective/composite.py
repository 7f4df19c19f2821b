"""A surrogate with what any of them may be combined with: correction, mask, KL, entropy."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from trainer.objective.correction import BehaviourCorrection, off_policy_mask
from trainer.objective.kl import KlEstimator, kl_estimate
from trainer.objective.policy_loss import Objective, Slots, Tokens


@dataclass(frozen=True, kw_only=True)
class Composite:
    """What ``registry`` builds from ``[objective]``."""

    surrogate: Objective
    correction: BehaviourCorrection | None = None
    off_policy_delta: float | None = None
    """See ``off_policy_mask``."""
    kl_coef: float = 0.0
    kl_estimator: KlEstimator = "k3+"
    kl_weighted: bool = False
    """Put the penalty into Term2, where IS weights it, instead of beside the form."""
    entropy_coef: float = 0.0

    def slots(self, tokens: Tokens) -> Slots:
        importance, term1, term2, clipped, extra = self.surrogate.slots(tokens)
        if self.correction is not None:
            weight, outside = self.correction.weight(tokens)
            importance, clipped = importance * weight, clipped | outside
        if self.off_policy_delta is not None:
            dropped = off_policy_mask(tokens, self.off_policy_delta)
            importance, clipped = jnp.where(dropped, 0.0, importance), clipped | dropped
        if self.kl_coef:
            estimate = kl_estimate(self.kl_estimator, tokens.theta, tokens.reference)
            if self.kl_weighted:
                term2 -= self.kl_coef * estimate
            else:
                extra -= self.kl_coef * estimate
        if self.entropy_coef:
            extra += self.entropy_coef * tokens.entropy
        return Slots(importance, term1, term2, clipped, extra)
