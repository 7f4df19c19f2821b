"""Credit that depends on the policy's own log-probs: a KL penalty in the reward.

With k_t = log pi_old(y_t) - log pi_ref(y_t) (estimator k1) and coefficient b:

* ``zero``: A_t = -b k_t, on-policy distillation: each token is rewarded for what the teacher thinks
  of it, without a return;
* ``batch`` (REINFORCE++, 2501.03262): A_t = R - b sum_{j >= t} k_j, whitened over the step;
* else the penalty of a whole trajectory is taken off its reward, then the group compares (RLOO).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trainer.credit import TrainingSequence
from trainer.objective.advantage import step_advantages
from trainer.objective.config import ObjectiveConfig

TokenValues = list[list[np.ndarray]]
"""Per group, per sequence, one number per response token; NaN where nothing is trained."""


def penalised_advantages(
    groups: Sequence[Sequence[TrainingSequence]],
    config: ObjectiveConfig,
    old: TokenValues,
    reference: TokenValues,
) -> TokenValues:
    """Advantages of every token with ``kl_coef`` times the estimate taken off, float64."""
    coef = config.kl_coef
    penalties = [
        [np.where(s.loss_mask, coef * (a - b), 0.0) for s, a, b in zip(*each, strict=True)]
        for each in zip(groups, old, reference, strict=True)
    ]
    if config.advantage == "zero":
        return [[-p for p in group] for group in penalties]
    if config.advantage == "batch":
        return _whitened_returns(groups, penalties, config.eps)
    return _penalised_groups(groups, penalties, config)


def _whitened_returns(
    groups: Sequence[Sequence[TrainingSequence]], penalties: TokenValues, eps: float
) -> TokenValues:
    returns = [
        [s.reward - np.cumsum(p[::-1])[::-1] for s, p in zip(*pair, strict=True)]
        for pair in zip(groups, penalties, strict=True)
    ]
    flat = [
        r[s.loss_mask]
        for pair in zip(groups, returns, strict=True)
        for s, r in zip(*pair, strict=True)
    ]
    values = np.concatenate([*flat, []])
    if values.size == 0 or np.all(values == values[0]):
        return [[np.zeros_like(r) for r in group] for group in returns]
    return [[(r - values.mean()) / (values.std() + eps) for r in group] for group in returns]


def _penalised_groups(
    groups: Sequence[Sequence[TrainingSequence]], penalties: TokenValues, config: ObjectiveConfig
) -> TokenValues:
    rewards: list[dict[int, float]] = []
    lengths: list[dict[int, int]] = []
    for group, penalty in zip(groups, penalties, strict=True):
        of = {s.trajectory: s.reward for s in group}
        tokens = dict.fromkeys(of, 0)
        for s, p in zip(group, penalty, strict=True):
            of[s.trajectory] -= float(p.sum())
            tokens[s.trajectory] += s.trainable_tokens
        rewards.append(of)
        lengths.append(tokens)
    values = step_advantages(
        [np.array(list(of.values())) for of in rewards],
        [np.array(list(of.values())) for of in lengths],
        config.advantage,
        config.eps,
        config.accept_above,
    )
    found = [dict(zip(of, v, strict=True)) for of, v in zip(rewards, values, strict=True)]
    return [
        [np.full(s.response_ids.size, of[s.trajectory]) for s in group]
        for group, of in zip(groups, found, strict=True)
    ]
