"""PPO's clipped surrogate, as GRPO uses it, with clip-higher and dual clip.

2402.03300 (GRPO), 1707.06347 (PPO), 2503.14476 (DAPO: ``clip_high`` 0.28), 2505.07291
(INTELLECT-2: ``dual_clip`` 4).

The published surrogate is min(r A, clip(r, 1 - low, 1 + high) A) with r = pi_theta / pi_old, for
A < 0 bounded below by c A. Its gradient is r M A grad log pi_theta, where M = 0 exactly when a
clipped branch is taken: A > 0 and r > 1 + high, or A < 0 and r < 1 - low or r > c. That is what the
slots say: IS = r M.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from trainer.objective.policy_loss import Slots, Tokens, ratio


@dataclass(frozen=True, kw_only=True)
class Grpo:
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    """c > 1; None: no bound."""

    def slots(self, tokens: Tokens) -> Slots:
        r, advantages = ratio(tokens.theta, tokens.old), tokens.advantages
        below = r < 1 - self.clip_low
        if self.dual_clip is not None:
            below |= r > self.dual_clip
        clipped = jnp.where(advantages > 0, r > 1 + self.clip_high, below) & (advantages != 0)
        return Slots(jnp.where(clipped, 0.0, r), tokens.theta, 0.0, clipped)
