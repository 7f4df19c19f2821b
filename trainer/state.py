"""Everything a step changes, as one pytree."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from trainer.model.transformer import Params


@flax.struct.dataclass
class TrainState:
    params: Params
    opt_state: optax.OptState
    rng: jax.Array
    """uint32 key data; no objective draws from it yet, but a checkpoint without it would lie."""
    step: jax.Array
    """int32: the version these parameters are, or will be once its last optimizer call is done."""
    optimizer_step: jax.Array
    """int32: optimizer calls made so far."""
    critic: dict[str, Any] | None = None
    """``params`` and ``opt_state`` of the critic (``trainer.critic``), if there is one."""


def new_state(params: Params, optimizer: optax.GradientTransformation, seed: int) -> TrainState:
    """State of version 0. ``params`` is taken over: the first step donates its buffers."""
    return TrainState(
        params=params,
        opt_state=optimizer.init(params),
        rng=jax.random.key_data(jax.random.key(seed)),
        step=jnp.zeros((), jnp.int32),
        optimizer_step=jnp.zeros((), jnp.int32),
    )
