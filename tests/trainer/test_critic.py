"""The critic: learns returns, does not depend on rows, and is part of a checkpoint."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from tests.trainer.sequences import MODEL, make_sequences
from trainer.checkpoint import Checkpoints, Progress
from trainer.config import OptimizerConfig, TrainerSections
from trainer.critic import Critic
from trainer.model.transformer import init_params
from trainer.objective.config import ObjectiveConfig
from trainer.optimizer import build_optimizer
from trainer.packing import PackingConfig, gather, pack, scatter
from trainer.state import new_state

OWN = TrainerSections(
    objective=ObjectiveConfig(name="ppo", critic_lr=1e-2),
    optimizer=OptimizerConfig(warmup_steps=0),
)
SEQUENCES = make_sequences(7, 4, 4)


@pytest.fixture(scope="module")
def critic():
    return Critic(MODEL, OWN)


@pytest.fixture(scope="module")
def params():
    return jax.jit(lambda key: init_params(MODEL, key))(jax.random.key(1))


def packed(**shape):
    return pack(SEQUENCES, PackingConfig(**shape), denominator=1.0, step=1)


def test_it_learns_the_returns_and_starts_at_zero(critic, params):
    batch, state = packed(row_tokens=128), critic.new(params)
    goals = [np.full(s.response_ids.size, 0.5 + 0.1 * (i % 3)) for i, s in enumerate(SEQUENCES)]
    returns, losses = gather(batch, goals), []
    assert not np.asarray(critic.values(state["params"], batch)).any()
    for _ in range(40):
        before = critic.values(state["params"], batch)
        state, loss = critic.step(state, batch, returns, before)
        losses.append(float(loss))
    assert losses[-1] < 0.05 * losses[0]


def test_rows_and_micro_batches_change_nothing(critic, params):
    found = []
    for shape in ({"row_tokens": 128}, {"row_tokens": 16, "micro_batch_tokens": 32}):
        batch, state = packed(**shape), critic.new(params)
        returns = gather(batch, [np.full(s.response_ids.size, 1.0) for s in SEQUENCES])
        zeros = np.zeros_like(returns)
        losses = []
        for _ in range(2):
            state, loss = critic.step(state, batch, returns, zeros)
            losses.append(float(loss))
        values = scatter(batch, np.asarray(critic.values(state["params"], batch)), SEQUENCES)
        found.append((losses, np.concatenate(values)))
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-5)
    np.testing.assert_allclose(found[0][1], found[1][1], atol=1e-5)


@pytest.mark.parametrize("with_critic", [True, False])
def test_a_checkpoint_holds_the_critic_if_there_is_one(tmp_path, critic, params, with_critic):
    state = new_state(params, build_optimizer(OWN.optimizer), 0)
    if with_critic:
        state = state.replace(critic=critic.new(params))
    first = Checkpoints(str(tmp_path / "c"), 2)
    first.save(state, Progress(version=3))
    first.close()
    like = jax.eval_shape(lambda: state)
    second = Checkpoints(str(tmp_path / "c"), 2)
    found, progress = second.restore(like)
    second.close()
    assert progress.version == 3
    assert jax.tree.structure(found) == jax.tree.structure(state)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(a, b)
    assert dataclasses.is_dataclass(found)
