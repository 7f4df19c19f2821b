"""Group advantages, in float64 on the host: how much better a trajectory did than its siblings.

Kinds (R_i the reward of trajectory i of a group of n):

========  =====================================================  ==========================
mean      A_i = R_i - mean(R)                                    Dr. GRPO, 2503.20783
mean_std  A_i = (R_i - mean(R)) / (std(R) + eps), population std  GRPO, 2402.03300
rloo      A_i = R_i - mean_{j != i}(R_j) = n/(n-1) (R_i - mean)   RLOO, 2402.14740
none      A_i = R_i                                              plain REINFORCE
========  =====================================================  ==========================

Equal rewards give exactly zero: float32 rewards need not have a float32 mean that equals them, so
a standard deviation of 1e-9 would otherwise turn noise into advantages of order one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from infra.contracts.errors import ConfigError

AdvantageKind = Literal["mean", "mean_std", "rloo", "none"]


def group_advantages(
    rewards: Sequence[float] | np.ndarray, kind: AdvantageKind, eps: float = 1e-4
) -> np.ndarray:
    """Advantages of one group's trajectories.

    Args:
        rewards: one per trajectory (sequences of one trajectory share it), shape [n].
        kind: see the module.
        eps: added to the standard deviation (``mean_std`` only).

    Returns:
        float64[n]. A single trajectory has nothing to be compared with and gets 0.

    >>> group_advantages([1.0, 0.0, 0.0, 0.0], "rloo").round(4).tolist()
    [1.0, -0.3333, -0.3333, -0.3333]
    """
    r = np.asarray(rewards, np.float64)
    if kind == "none":
        return r
    if r.size == 0 or np.all(r == r[0]):
        return np.zeros_like(r)
    centred = r - r.mean()
    if kind == "mean_std":
        return centred / (r.std() + eps)
    if kind == "rloo":
        return centred * (r.size / (r.size - 1))
    return centred


def check_group_size(kind: AdvantageKind, n: int) -> None:
    """Refuse group advantages over one sample. Raises ``ConfigError``."""
    if kind != "none" and n < 2:
        raise ConfigError(
            f"sampling.n = {n} with objective.advantage = '{kind}': a group of one has no signal; "
            "set sampling.n to at least 2, or objective.advantage to 'none'"
        )
