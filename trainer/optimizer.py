"""AdamW with a learning rate that is a pure function of the step.

Nothing counts calls behind one's back: the step that a batch belongs to decides its rate, so a
resumed or replayed run has the rate of the straight one, and several optimizer calls within one
step share it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from trainer.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: jax.Array | int) -> jax.Array:
    """Rate of step ``step`` >= 1: linear warm-up, then constant, or a cosine to ``final_lr``.

    With w = warmup_steps, d = decay_steps, f = final_lr:
    lr(s) = lr * min(1, s / w) * (f + (1 - f) (1 + cos(pi * clip((s - w) / (d - w), 0, 1))) / 2).
    """
    s = jnp.asarray(step, jnp.float32)
    rate = config.lr * jnp.minimum(1.0, s / max(1, config.warmup_steps))
    if config.schedule == "cosine":
        span = config.decay_steps - config.warmup_steps
        done = jnp.clip((s - config.warmup_steps) / span, 0.0, 1.0)
        rate *= config.final_lr + (1 - config.final_lr) * (1 + jnp.cos(jnp.pi * done)) / 2
    return rate


def build_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Directions of AdamW for rate 1, clipped to ``clip_norm`` first; the step multiplies by -lr.

    Weight decay applies to matrices only (norms and biases keep their size).
    """
    parts = [optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps)]
    if config.clip_norm:
        parts.insert(0, optax.clip_by_global_norm(config.clip_norm))
    if config.weight_decay:
        matrices = lambda params: jax.tree.map(lambda p: p.ndim >= 2, params)  # noqa: E731
        parts.append(optax.add_decayed_weights(config.weight_decay, mask=matrices))
    return optax.chain(*parts)
