"""It learns: a bandit whose best answer is one token, through groups, packing, step."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from infra.contracts import ids
from tests.builders import make_judgement
from tests.trainer.miniature_run import make_config
from tests.trainer.sequences import MODEL, make_training_group
from trainer.learner import Learner
from trainer.model.transformer import head_logits, hidden_states, init_params

BEST = 5
PROMPT = np.array([1, 2, 3], np.int32)


def bandit_group(index, step, logprobs, rng):
    """Eight one-token answers sampled from the policy; 1 for the best token, else 0."""
    group = make_training_group(index, version=step - 1, n=8)
    arms = rng.choice(MODEL.vocab, 8, p=np.exp(logprobs) / np.exp(logprobs).sum())
    rollouts, judgements = [], []
    for old, arm in zip(group.rollouts, arms, strict=True):
        response = np.array([arm], np.int32)
        rollout = dataclasses.replace(
            old,
            rollout_id=ids.rollout_id(group.group_id, old.sample_index, response, old.weights),
            prompt_ids=PROMPT,
            response_ids=response,
            loss_mask=np.ones(1, bool),
            raw_logprobs=logprobs[arm][None],
            behaviour_logprobs=logprobs[arm][None],
            policy_versions=np.full(1, step - 1, np.int32),
        )
        rollouts.append(rollout)
        judgements.append(make_judgement(rollout, reward=float(arm == BEST)))
    return dataclasses.replace(group, rollouts=tuple(rollouts), judgements=tuple(judgements))


def policy_of(prompt):
    """params -> log-probs of the token after the prompt."""

    @jax.jit
    def policy(params):
        ids = prompt[None]
        hidden = hidden_states(params, MODEL, ids, np.arange(3)[None], ids * 0 + 1, ids * 0)
        return jax.nn.log_softmax(head_logits(params, MODEL, hidden[0, -1]))

    return policy


@pytest.mark.parametrize(
    "objective",
    [
        {"name": "grpo", "entropy_coef": 1e-3},
        {"name": "aipo"},
        {"name": "ppo", "critic_lr": 1e-2, "kl_coef": 0.01},
        {"name": "rloo", "kl_coef": 0.01},
        {"name": "cispo", "kl_coef": 0.01},
        {"name": "kto", "beta": 1.0},
        {"name": "dpo", "beta": 1.0},
    ],
    ids=lambda table: table["name"],
)
def test_the_best_arm_wins(tmp_path, objective):
    config = make_config(tmp_path / "run", 30, objective=objective, optimizer={"lr": 3e-2})
    make = jax.jit(lambda key: init_params(MODEL, key))
    learner = Learner(MODEL, config, reference=make(jax.random.key(0)))
    state = learner.new_state(make(jax.random.key(0)))

    policy = policy_of(PROMPT)
    rng = np.random.default_rng(0)
    start = float(np.exp(policy(state.params))[BEST])
    gaps = []
    for step in range(1, 31):
        logprobs = np.array(policy(state.params))
        groups = [bandit_group(4 * step + i, step, logprobs, rng) for i in range(4)]
        state, learned = learner.learn(state, groups, step)
        gaps.append(learned.metrics["logprob_gap_max"])
    assert start < 0.3
    assert float(np.exp(policy(state.params))[BEST]) > 0.9
    assert max(gaps) < 1e-4


def test_a_teacher_is_followed_without_any_reward(tmp_path):
    """On-policy distillation: the policy comes closer to the teacher; rewards are not read."""
    config = make_config(
        tmp_path / "run", 30, objective={"name": "distill"}, optimizer={"lr": 1e-2}
    )
    make = jax.jit(lambda key: init_params(MODEL, key))
    sharp = jax.tree.map(lambda p: 6 * p, make(jax.random.key(5)))
    learner = Learner(MODEL, config, reference=sharp)
    state = learner.new_state(make(jax.random.key(0)))
    policy, rng, far = policy_of(PROMPT), np.random.default_rng(0), []
    teacher = np.array(policy(sharp))
    for step in range(1, 31):
        logprobs = np.array(policy(state.params))
        far.append(float(np.sum(np.exp(logprobs) * (logprobs - teacher))))
        groups = [bandit_group(4 * step + i, step, logprobs, rng) for i in range(4)]
        state, _ = learner.learn(state, groups, step)
    assert far[0] > 0.5
    assert far[-1] < 0.1 * far[0]
