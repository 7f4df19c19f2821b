"""Random targets of three sequences, and the loss of an objective on them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from trainer.objective.policy_loss import Objective, Tokens, policy_loss

SHAPE = (3, 7)
DENOMINATOR = 11.0
SEQUENCES = np.repeat(np.arange(3), 7).reshape(SHAPE)


def make_tokens(seed: int = 0) -> Tokens:
    """A row is a sequence; its advantage is one number, as it is for group advantages."""
    rng = np.random.default_rng(seed)
    theta = -rng.exponential(2, SHAPE)
    return Tokens(
        theta=theta,
        entropy=rng.random(SHAPE),
        old=theta + rng.normal(0, 0.4, SHAPE),
        behaviour=theta + rng.normal(0, 0.8, SHAPE),
        reference=theta + rng.normal(0, 0.5, SHAPE),
        advantages=np.broadcast_to(np.array([[1.3], [-0.7], [0.0]]), SHAPE).copy(),
        scales=rng.random(SHAPE) + 0.5,
        mask=rng.random(SHAPE) > 0.3,
        sequences=SEQUENCES,
    )


def loss_of(objective: Objective, tokens: Tokens, theta=None) -> jax.Array:
    tokens = Tokens(*map(jnp.asarray, tokens))
    if theta is not None:
        tokens = tokens._replace(theta=theta)
    return policy_loss(objective, tokens, jnp.float32(DENOMINATOR))


def gradient_of(objective: Objective, tokens: Tokens) -> np.ndarray:
    """d loss / d theta, token by token."""
    slope = jax.grad(lambda theta: loss_of(objective, tokens, theta)[0])
    return np.asarray(slope(jnp.asarray(tokens.theta)))
