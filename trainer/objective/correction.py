"""Corrections for tokens that another policy sampled: IS *= w(c), c = pi_old / mu.

mu is the engine's policy: older (lag), and another program even at the same version. With theta =
old the token form is truncated importance sampling (TIS); with a trust region around old it is
AReaL's decoupled PPO (2505.24298, cap 5). ``mask`` in place of ``truncate`` is IcePop / MIS
(2510.18855: 0.5 to 5): what lies outside contributes nothing. The sequence forms take c of the
whole response (unbiased, of large variance) or its geometric mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp

from trainer.objective.policy_loss import Tokens, ratio, sequence_mean, sequence_sum

CorrectionMode = Literal["truncate", "mask"]
CorrectionLevel = Literal["token", "sequence", "geometric"]


@dataclass(frozen=True, kw_only=True)
class BehaviourCorrection:
    mode: CorrectionMode = "truncate"
    level: CorrectionLevel = "token"
    floor: float = 0.0
    cap: float = 2.0

    def weight(self, tokens: Tokens) -> tuple[Any, Any]:
        """(w, where a bound applied), shaped like the tokens."""
        gap = tokens.old - tokens.behaviour
        if self.level == "sequence":
            gap = sequence_sum(gap, tokens)
        elif self.level == "geometric":
            gap = sequence_mean(gap, tokens)
        c = ratio(gap, 0.0)
        outside = (c > self.cap) | (c < self.floor)
        if self.mode == "mask":
            return jnp.where(outside, 0.0, c), outside
        return jnp.clip(c, self.floor, self.cap), outside


def off_policy_mask(tokens: Tokens, delta: float) -> Any:
    """True for tokens to be dropped: A < 0 and mean_t log(mu / pi_theta) > delta.

    DeepSeek-V3.2 (2512.02556): a bad response that the policy would hardly give any more teaches
    nothing and disturbs; a good one may stay.
    """
    strayed = sequence_mean(tokens.behaviour - tokens.theta, tokens) > delta
    return strayed & (tokens.advantages < 0)
