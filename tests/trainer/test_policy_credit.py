"""A KL penalty in the reward, by hand."""

from __future__ import annotations

import dataclasses

import numpy as np

from tests.trainer.sequences import make_sequences
from trainer.objective.config import ObjectiveConfig
from trainer.policy_credit import (
    gae,
    gae_advantages,
    penalised_advantages,
    token_penalties,
)


def make_group(rewards, masks):
    base = make_sequences(0, 1, 1)[0]
    return [
        dataclasses.replace(
            base,
            response_ids=np.ones(len(mask), np.int32),
            loss_mask=np.array(mask, bool),
            raw_logprobs=np.zeros(len(mask), np.float32),
            behaviour_logprobs=np.zeros(len(mask), np.float32),
            reward=reward,
            trajectory=i,
        )
        for i, (reward, mask) in enumerate(zip(rewards, masks, strict=True))
    ]


GROUPS = [make_group([1.0, 0.0], [[1, 1, 0], [1, 0, 1]]), make_group([0.0, 0.0], [[1, 1, 1]] * 2)]
K = [[[0.1, -0.2, 9], [0.4, 9, 0.0]], [[0.1, 0.2, 0.3], [0.0, 0.0, 0.0]]]
OLD = [[np.where(s.loss_mask, k, np.nan) for s, k in zip(*pair, strict=True)]
       for pair in zip(GROUPS, K, strict=True)]  # fmt: skip
REFERENCE = [[np.where(s.loss_mask, 0.0, np.nan) for s in group] for group in GROUPS]


def found(**settings):
    config = ObjectiveConfig(kl_in="reward", **settings)
    penalties = token_penalties(GROUPS, config.kl_coef, OLD, REFERENCE)
    return penalised_advantages(GROUPS, config, penalties)


def test_distillation_rewards_each_token_for_the_teachers_opinion():
    values = found(name="distill", kl_coef=2.0)
    np.testing.assert_allclose(values[0][0][:2], [-0.2, 0.4])
    np.testing.assert_allclose(values[1][0], [-0.2, -0.4, -0.6], rtol=1e-6)


def test_a_group_compares_rewards_after_the_penalty():
    values = found(name="rloo", kl_coef=0.5)
    rewards = [1.0 - 0.5 * -0.1, 0.0 - 0.5 * 0.4]
    np.testing.assert_allclose(values[0][0], rewards[0] - rewards[1])
    np.testing.assert_allclose(values[0][1], rewards[1] - rewards[0])
    # Equal rewards, unequal penalties: there is something to learn now.
    np.testing.assert_allclose(values[1][0], -0.3, rtol=1e-6)


def test_reinforce_pp_whitens_returns_to_go_over_the_step():
    values = found(name="reinforce_pp", kl_coef=1.0, eps=1e-9)
    returns = [1.1, 1.2, -0.4, 0.0, -0.6, -0.5, -0.3, 0.0, 0.0, 0.0]
    expected = (np.array(returns) - np.mean(returns)) / np.std(returns)
    got = [
        v[s.loss_mask]
        for pair in zip(values, GROUPS, strict=True)
        for v, s in zip(*pair, strict=True)
    ]
    np.testing.assert_allclose(np.concatenate(got), expected, rtol=1e-6)


def test_gae_is_the_sum_of_discounted_errors():
    """By the definition, not the recursion."""
    rng = np.random.default_rng(0)
    rewards, values = rng.normal(size=6), rng.normal(size=6)
    advantages, returns = gae(rewards, values, 0.9, 0.8)
    v = np.append(values, 0.0)
    deltas = rewards + 0.9 * v[1:] - v[:-1]
    expected = [sum((0.9 * 0.8) ** (j - t) * deltas[j] for j in range(t, 6)) for t in range(6)]
    np.testing.assert_allclose(advantages, expected)
    np.testing.assert_allclose(returns, advantages + values)


def test_gae_with_lambda_one_is_return_minus_value():
    rewards, values = np.array([0.0, 0.5, 1.0]), np.array([0.3, -0.2, 0.1])
    advantages, returns = gae(rewards, values, 1.0, 1.0)
    np.testing.assert_allclose(returns, [1.5, 1.5, 1.0])
    np.testing.assert_allclose(advantages, returns - values)


def test_gae_over_a_step_skips_what_is_not_trained():
    config = ObjectiveConfig(name="ppo", gae_lambda=1.0, eps=1e-9)
    nothing = [[np.zeros(s.response_ids.size) for s in group] for group in GROUPS]
    values = [[np.where(s.loss_mask, 0.25, np.nan) for s in group] for group in GROUPS]
    advantages, returns = gae_advantages(GROUPS, config, nothing, values)
    np.testing.assert_allclose(returns[0][0], [1, 1, 0])  # masked: 0, never NaN
    flat = [
        a[s.loss_mask]
        for p in zip(GROUPS, advantages, strict=True)
        for s, a in zip(*p, strict=True)
    ]
    every = np.concatenate(flat)
    np.testing.assert_allclose([every.mean(), every.std()], [0, 1], atol=1e-9)
    assert advantages[0][0][0] > advantages[0][1][0]
