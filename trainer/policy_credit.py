"""Credit that depends on what models say of a response: a KL penalty in the reward, a critic.

With k_t = log pi_old(y_t) - log pi_ref(y_t) (estimator k1) and coefficient b:

* ``zero``: A_t = -b k_t, on-policy distillation: each token is rewarded for what the teacher thinks
  of it, without a return;
* ``batch`` (REINFORCE++, 2501.03262): A_t = R - b sum_{j >= t} k_j, whitened over the step;
* else the penalty of a whole trajectory is taken off its reward, then the group compares (RLOO);
* ``gae`` (1506.02438, equation 16) takes -b k_t as a token's reward, R as the last one's more, and
  values V_t of the text before token t: A_t = sum_l (gamma lambda)^l delta_{t+l} with
  delta_t = r_t + gamma V_{t+1} - V_t; the critic learns A_t + V_t; advantages are then whitened.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trainer.credit import TrainingSequence, trajectory_advantages
from trainer.objective.config import ObjectiveConfig

Groups = Sequence[Sequence[TrainingSequence]]
TokenValues = list[list[np.ndarray]]
"""Per group, per sequence, one number per response token; NaN where nothing is trained."""


def token_penalties(
    groups: Groups, coef: float, old: TokenValues, reference: TokenValues
) -> TokenValues:
    """coef * (log pi_old - log pi_ref) of each trainable token, 0 elsewhere."""
    return [
        [np.where(s.loss_mask, coef * (a - b), 0.0) for s, a, b in zip(*each, strict=True)]
        for each in zip(groups, old, reference, strict=True)
    ]


def penalised_advantages(
    groups: Groups, config: ObjectiveConfig, penalties: TokenValues
) -> TokenValues:
    """Advantages of every token with the penalties (``token_penalties``) taken off, float64."""
    if config.advantage == "zero":
        return [[-p for p in group] for group in penalties]
    if config.advantage == "batch":
        returns = [
            [s.reward - np.cumsum(p[::-1])[::-1] for s, p in zip(*pair, strict=True)]
            for pair in zip(groups, penalties, strict=True)
        ]
        return _whitened(groups, returns, config.eps)
    return _penalised_groups(groups, penalties, config)


def gae_advantages(
    groups: Groups, config: ObjectiveConfig, penalties: TokenValues, values: TokenValues
) -> tuple[TokenValues, TokenValues]:
    """Advantages whitened over the step, and the returns that the critic learns.

    ``values``: the critic's, of the text before each token. Each sequence is its own episode.
    """
    advantages: TokenValues = []
    returns: TokenValues = []
    for group, of_group, before in zip(groups, penalties, values, strict=True):
        advantages.append([])
        returns.append([])
        for s, penalty, value in zip(group, of_group, before, strict=True):
            mask, rewards = s.loss_mask, -penalty[s.loss_mask]
            if rewards.size:
                rewards[-1] += s.reward
            for out, found in zip(
                (advantages, returns),
                gae(rewards, value[mask], config.gamma, config.gae_lambda),
                strict=True,
            ):
                whole = np.zeros(mask.size)
                whole[mask] = found
                out[-1].append(whole)
    return _whitened(groups, advantages, config.eps), returns


def gae(
    rewards: np.ndarray, values: np.ndarray, gamma: float, lam: float
) -> tuple[np.ndarray, np.ndarray]:
    """(advantages, returns) of one response, float64[T]; nothing follows its last token."""
    v = np.append(np.asarray(values, np.float64), 0.0)
    deltas, out, running = rewards + gamma * v[1:] - v[:-1], np.zeros(rewards.size), 0.0
    for t in reversed(range(rewards.size)):
        running = out[t] = deltas[t] + gamma * lam * running
    return out, out + v[:-1]


def _whitened(groups: Groups, values: TokenValues, eps: float) -> TokenValues:
    """Mean 0 and deviation 1 over the step's trainable tokens; equal values become 0."""
    flat = [
        v[s.loss_mask]
        for pair in zip(groups, values, strict=True)
        for s, v in zip(*pair, strict=True)
    ]
    every = np.concatenate([*flat, []])
    if every.size == 0 or np.all(every == every[0]):
        return [[np.zeros_like(v) for v in group] for group in values]
    return [[(v - every.mean()) / (every.std() + eps) for v in group] for group in values]


def _penalised_groups(
    groups: Groups, penalties: TokenValues, config: ObjectiveConfig
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
    found = trajectory_advantages(rewards, lengths, config)
    return [
        [np.full(s.response_ids.size, of[s.trajectory]) for s in group]
        for group, of in zip(groups, found, strict=True)
    ]
