"""GRPO and its clip-higher variant (2402.03300; DAPO, 2503.14476).

The published surrogate is min(r A, clip(r, 1 - low, 1 + high) A) with r = pi_theta / pi_old. Its
gradient is r M A grad log pi_theta, where M = 0 exactly when the clipped branch is the smaller one:
A > 0 and r > 1 + high, or A < 0 and r < 1 - low. That is what the slots say: IS = r M.

With a behaviour correction IS is further multiplied by min(pi_old / mu, cap): decoupled PPO
(AReaL, 2505.24298) or truncated importance sampling, when theta = old.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from trainer.objective.policy_loss import Slots, TokenLogprobs, ratio


@dataclass(frozen=True, kw_only=True)
class Grpo:
    clip_low: float = 0.2
    clip_high: float = 0.2
    """Larger than ``clip_low`` is DAPO's clip-higher (0.28)."""
    behaviour_cap: float | None = None
    """Cap of pi_old / mu; None: no behaviour correction."""

    def slots(self, logprobs: TokenLogprobs, advantages: Any) -> Slots:
        r = ratio(logprobs.theta, logprobs.old)
        clipped = jnp.where(advantages > 0, r > 1 + self.clip_high, r < 1 - self.clip_low)
        clipped &= advantages != 0
        weight, capped = behaviour_weight(logprobs, self.behaviour_cap)
        importance = jnp.where(clipped, 0.0, r) * weight
        return Slots(importance, logprobs.theta, 0.0, clipped | capped)


def behaviour_weight(logprobs: TokenLogprobs, cap: float | None) -> tuple[Any, Any]:
    """(min(pi_old / mu, cap), where the cap applied); (1, False) without a correction."""
    if cap is None:
        return 1.0, jnp.zeros_like(logprobs.old, bool)
    c = ratio(logprobs.old, logprobs.behaviour)
    return jnp.minimum(c, cap), c > cap
