"""PPO's critic: a decoder like the policy, started from it, with one number in place of the head.

V_t is what the critic expects of a response before its token t: read at the position that predicts
the token, so that a packed row serves policy and critic alike. The head starts at zero, values too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from trainer.batch import Batch
from trainer.config import OptimizerConfig, TrainerSections
from trainer.model.config import ModelConfig
from trainer.model.transformer import Params, hidden_states
from trainer.optimizer import build_optimizer, learning_rate
from trainer.step import each_micro_batch, micro_batch

CriticState = dict[str, Any]
"""``params`` (``trunk``, like the policy's, and ``head``, float32[dim]) and ``opt_state``."""


class Critic:
    """The compiled critic of one configuration, on AdamW; its state is part of ``TrainState``."""

    def __init__(self, model: ModelConfig, own: TrainerSections) -> None:
        self._model = model
        self._optimizer = replace(own.optimizer, name="adamw", lr=own.objective.critic_lr)
        self.values = build_token_values(model)
        self.step = build_critic_step(model, self._optimizer, own.objective.value_clip)

    def new(self, policy: Params) -> CriticState:
        """A critic that starts as a copy of the policy's trunk."""
        trunk = jax.tree.map(jnp.copy, policy)
        params = {"trunk": trunk, "head": jnp.zeros(self._model.dim, jnp.float32)}
        return {"params": params, "opt_state": build_optimizer(self._optimizer).init(params)}


def build_token_values(model: ModelConfig) -> Callable[[Params, Batch], jax.Array]:
    """Return the jitted ``(critic's params, batch) -> float32[K,M]`` values before the targets."""

    def token_values(params: Params, batch: Batch) -> jax.Array:
        def body(k: jax.Array, out: jax.Array) -> jax.Array:
            return out.at[k].set(_values(params, model, micro_batch(batch, k)))

        return each_micro_batch(batch, body, jnp.zeros(batch.targets.shape, jnp.float32))

    return jax.jit(token_values)


def build_critic_step(
    model: ModelConfig, optimizer: OptimizerConfig, value_clip: float
) -> Callable[[CriticState, Batch, jax.Array, jax.Array], tuple[CriticState, jax.Array]]:
    """Return the jitted ``(critic, batch, returns, old values) -> (critic, loss)``.

    Loss, mean over the trainable tokens of the call (PPO's clipped value loss):
    1/2 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2). Takes the critic over (donation).
    """
    optimizer_of = build_optimizer(optimizer)

    def critic_step(
        critic: CriticState, batch: Batch, returns: jax.Array, old: jax.Array
    ) -> tuple[CriticState, jax.Array]:
        count = jnp.maximum(jnp.sum(batch.loss_mask), 1).astype(jnp.float32)

        def loss(params: Params, k: jax.Array) -> jax.Array:
            micro = micro_batch(batch, k)
            goal, before = (jnp.where(micro.loss_mask, x[k], 0.0) for x in (returns, old))
            value = jnp.where(micro.loss_mask, _values(params, model, micro), 0.0)
            near = jnp.clip(value, before - value_clip, before + value_clip)
            worst = jnp.maximum((value - goal) ** 2, (near - goal) ** 2)
            return 0.5 * jnp.sum(jnp.where(micro.loss_mask, worst, 0.0)) / count

        def body(k: jax.Array, total: tuple) -> tuple:
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(critic["params"], k))

        nothing = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, critic["params"]))
        value, gradients = each_micro_batch(batch, body, nothing)
        updates, opt_state = optimizer_of.update(gradients, critic["opt_state"], critic["params"])
        rate = learning_rate(optimizer, batch.step)
        params = jax.tree.map(lambda p, u: p - rate * u, critic["params"], updates)
        return {"params": params, "opt_state": opt_state}, value

    return jax.jit(critic_step, donate_argnums=0)


def _values(params: Params, model: ModelConfig, micro: Batch) -> jax.Array:
    rows = (micro.tokens, micro.positions, micro.segments, micro.prefixes)
    hidden = hidden_states(params["trunk"], model, *rows)
    return hidden.reshape(-1, hidden.shape[-1])[micro.sources] @ params["head"]
