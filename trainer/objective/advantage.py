"""Advantages, in float64 on the host: how much better a trajectory did than its siblings.

Kinds (R_i the reward of trajectory i of a group of n, T_i its trainable tokens):

==============  =====================================================  ==========================
mean            A_i = R_i - mean(R)                                    Dr. GRPO, 2503.20783
mean_std        A_i = (R_i - mean(R)) / (std(R) + eps), population std  GRPO, 2402.03300
mean_batch_std  (R_i - mean(R)) / (std of these over the step + eps)   ScaleRL, 2510.13786
batch           (R_i - mean over the step) / (std over the step + eps)  REINFORCE++, 2501.03262
rloo            A_i = R_i - mean_{j != i}(R_j) = n/(n-1) (R_i - mean)   RLOO, 2402.14740
opo             A_i = R_i - sum_j(T_j R_j) / sum_j(T_j)                OPO, 2505.23585
max_rl          A_i = (R_i - mean(R)) / mean(R); 0 if mean(R) <= 0     MaxRL, 2602.02710
best_margin     the best alone: R_1st - R_2nd                          GRPO-passk
none            A_i = R_i                                              plain REINFORCE
accepted        1 if R_i > accept_above, else 0                        rejection fine-tuning
one, zero       the same for all                                       SFT; distillation
gae             from a critic's values, see ``gae``                    PPO, 1506.02438
==============  =====================================================  ==========================

Equal rewards give exactly zero: float32 rewards need not have a float32 mean that equals them, so
a standard deviation of 1e-9 would otherwise turn noise into advantages of order one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from infra.contracts.errors import ConfigError

AdvantageKind = Literal[
    "mean",
    "mean_std",
    "mean_batch_std",
    "batch",
    "rloo",
    "opo",
    "max_rl",
    "best_margin",
    "none",
    "accepted",
    "one",
    "zero",
    "gae",
]
ALONE = ("batch", "none", "accepted", "one", "zero", "gae")
"""Kinds that compare a trajectory with no sibling."""


def step_advantages(
    rewards: Sequence[np.ndarray],
    lengths: Sequence[np.ndarray],
    kind: AdvantageKind,
    eps: float = 1e-4,
    accept_above: float = 0.0,
) -> list[np.ndarray]:
    """Advantages of a whole step: one array per group, like ``rewards``.

    Args:
        rewards: per group, one per trajectory.
        lengths: likewise, trainable tokens.
        kind: see the module.
        eps: added to standard deviations.
        accept_above: for ``accepted``.
    """
    groups = [np.asarray(r, np.float64) for r in rewards]
    if kind == "batch":
        return _apart(_whitened(np.concatenate([*groups, []]), eps), groups)
    if kind == "mean_batch_std":
        centred = [group_advantages(r, "mean") for r in groups]
        every = np.concatenate([*centred, []])
        return [c / (every.std() + eps) for c in centred] if every.size else centred
    if kind == "opo":
        return [_opo(r, np.asarray(t, np.float64)) for r, t in zip(groups, lengths, strict=True)]
    if kind == "accepted":
        return [(r > accept_above).astype(np.float64) for r in groups]
    return [group_advantages(r, kind, eps) for r in groups]


def group_advantages(
    rewards: Sequence[float] | np.ndarray, kind: AdvantageKind, eps: float = 1e-4
) -> np.ndarray:
    """Advantages of one group's trajectories, for the kinds that need no more than their rewards.

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
    if kind in ("zero", "gae"):  # of gae, until the critic's values are there
        return np.zeros_like(r)
    if kind in ("none", "one"):
        return r if kind == "none" else np.ones_like(r)
    if r.size == 0 or np.all(r == r[0]):
        return np.zeros_like(r)
    centred = r - r.mean()
    if kind == "mean_std":
        return centred / (r.std() + eps)
    if kind == "rloo":
        return centred * (r.size / (r.size - 1))
    if kind == "max_rl":
        return centred / r.mean() if r.mean() > 0 else np.zeros_like(r)
    if kind == "best_margin":
        second, best = np.sort(r)[-2:]
        return np.where(np.arange(r.size) == r.argmax(), best - second, 0.0)
    if kind == "mean":
        return centred
    raise ValueError(f"advantage '{kind}' needs more than one group's rewards")


def check_group_size(kind: AdvantageKind, n: int) -> None:
    """Refuse group advantages over one sample. Raises ``ConfigError``."""
    if kind not in ALONE and n < 2:
        raise ConfigError(
            f"sampling.n = {n} with objective.advantage = '{kind}': a group of one has no signal; "
            "set sampling.n to at least 2, or objective.advantage to 'none'"
        )


def _whitened(values: np.ndarray, eps: float) -> np.ndarray:
    if values.size == 0 or np.all(values == values[0]):
        return np.zeros_like(values)
    return (values - values.mean()) / (values.std() + eps)


def _apart(values: np.ndarray, like: Sequence[np.ndarray]) -> list[np.ndarray]:
    return np.split(values, np.cumsum([r.size for r in like])[:-1]) if like else []


def _opo(rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    if rewards.size == 0 or np.all(rewards == rewards[0]) or not lengths.any():
        return np.zeros_like(rewards)
    return rewards - (lengths * rewards).sum() / lengths.sum()
