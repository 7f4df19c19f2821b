"""DPO and KTO on groups of scored rollouts: their exact gradients as advantages.

Both losses depend on a response only through d = log pi_theta(o) - log pi_ref(o). So their gradient
is sum_t (-dL/dd) grad log pi_theta(o_t): REINFORCE whose advantage is -dL/dd, a number for each
response, computed here from a first pass with the same parameters. Pairs need not share a row, and
nothing depends on how the batch is cut.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trainer.credit import TrainingSequence
from trainer.objective.config import ObjectiveConfig
from trainer.policy_credit import TokenValues


def preference_advantages(
    groups: Sequence[Sequence[TrainingSequence]],
    config: ObjectiveConfig,
    theta: TokenValues,
    reference: TokenValues,
) -> tuple[TokenValues, dict[str, float]]:
    """Advantages to be summed over tokens as they are, and the metrics of the true loss."""
    keys, margins, rewards = [], {}, {}
    for i, group in enumerate(groups):
        for s, a, b in zip(group, theta[i], reference[i], strict=True):
            key = (i, s.trajectory)
            if key not in margins:
                keys.append(key)
                margins[key], rewards[key] = 0.0, s.reward
            margins[key] += float(np.where(s.loss_mask, a - b, 0.0).sum())
    if config.preference == "dpo":
        found, facts = dpo(keys, margins, rewards, config.beta)
    else:
        found, facts = kto(margins, rewards, config.beta, config.accept_above)
    return [
        [np.full(s.response_ids.size, found.get((i, s.trajectory), 0.0)) for s in group]
        for i, group in enumerate(groups)
    ], facts


Key = tuple[int, int]
"""Group and trajectory."""


def dpo(
    keys: Sequence[Key], margins: dict[Key, float], rewards: dict[Key, float], beta: float
) -> tuple[dict[Key, float], dict[str, float]]:
    """-log sigmoid(beta (d_w - d_l)), mean over pairs (2305.18290, equation 7).

    Within a group the best is paired with the worst, the second best with the second worst, as long
    as their rewards differ.
    """
    pairs = []
    for group in dict.fromkeys(g for g, _ in keys):
        ranked = sorted((k for k in keys if k[0] == group), key=lambda k: -rewards[k])
        half = len(ranked) // 2
        both = zip(ranked[:half], ranked[::-1][:half], strict=True)
        pairs += [(w, l) for w, l in both if rewards[w] > rewards[l]]
    values: dict[Key, float] = {}
    losses, right = [], []
    for w, l in pairs:
        margin = beta * (margins[w] - margins[l])
        slope = beta * _sigmoid(-margin) / len(pairs)
        values[w], values[l] = slope, -slope
        losses.append(np.logaddexp(0.0, -margin))
        right.append(margin > 0)
    facts = {"loss": _mean(losses), "pairs": float(len(pairs)), "preference_accuracy": _mean(right)}
    return values, facts


def kto(
    margins: dict[Key, float], rewards: dict[Key, float], beta: float, accept_above: float
) -> tuple[dict[Key, float], dict[str, float]]:
    """1 - sigmoid(beta (d - z0)) for desirable, 1 - sigmoid(beta (z0 - d)) for undesirable
    responses, mean over all (2402.01306, equation 8).

    z0 = max(0, mean d) estimates KL(theta || ref) on the batch, without a gradient. The two sides
    are weighted so that both count the same however many there are of each.
    """
    good = {k: rewards[k] > accept_above for k in margins}
    counts = {side: sum(v == side for v in good.values()) for side in (True, False)}
    z0 = max(0.0, _mean(list(margins.values())))
    values: dict[Key, float] = {}
    losses, weights = [], []
    for key, d in margins.items():
        sign = 1.0 if good[key] else -1.0
        p = _sigmoid(sign * beta * (d - z0))
        weight = len(good) / (2 * counts[good[key]]) if all(counts.values()) else 1.0
        values[key] = sign * weight * beta * p * (1 - p) / len(good)
        losses.append(weight * (1 - p))
        weights.append(good[key])
    return values, {"loss": _mean(losses), "kl_batch": z0, "desirable_share": _mean(weights)}


def _sigmoid(x: float) -> float:
    return float(np.exp(-np.logaddexp(0.0, -x)))


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0
