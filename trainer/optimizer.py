"""AdamW or Muon, with a learning rate that is a pure function of the step.

Nothing counts calls behind one's back: the step that a batch belongs to decides its rate, so a
resumed or replayed run has the rate of the straight one, and several optimizer calls within one
step share it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from trainer.config import OptimizerConfig
from trainer.model.transformer import Params


def learning_rate(config: OptimizerConfig, step: jax.Array | int) -> jax.Array:
    """Rate of step ``step`` >= 1: linear warm-up, then constant, or a fall to ``final_lr``.

    With w = warmup_steps, d = decay_steps, f = final_lr, x = clip((s - w) / (d - w), 0, 1):
    lr(s) = lr * min(1, s / w) * (f + (1 - f) * fall(x)); fall is (1 + cos(pi x)) / 2 or 1 - x.
    """
    s = jnp.asarray(step, jnp.float32)
    rate = config.lr * jnp.minimum(1.0, s / max(1, config.warmup_steps))
    if config.schedule != "constant":
        span = config.decay_steps - config.warmup_steps
        done = jnp.clip((s - config.warmup_steps) / span, 0.0, 1.0)
        fall = 1 - done if config.schedule == "linear" else (1 + jnp.cos(jnp.pi * done)) / 2
        rate *= config.final_lr + (1 - config.final_lr) * fall
    return rate


MUON_RMS = 0.2
"""Root mean square of a Muon update: what AdamW's usually is (Moonlight, 2502.16982, section 2.2),
so that learning rate and weight decay carry over."""


def build_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Directions for rate 1, gradients clipped to ``clip_norm`` first; the step multiplies by -lr.

    Weight decay applies to matrices only (norms and biases keep their size).
    """
    parts = [_directions(config)]
    if config.clip_norm:
        parts.insert(0, optax.clip_by_global_norm(config.clip_norm))
    if config.weight_decay:
        matrices = lambda params: jax.tree.map(lambda p: p.ndim >= 2, params)  # noqa: E731
        parts.append(optax.add_decayed_weights(config.weight_decay, mask=matrices))
    return optax.chain(*parts)


def _directions(config: OptimizerConfig) -> optax.GradientTransformation:
    adam = optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps)
    if config.name == "adamw":
        return adam
    return optax.partition({"adam": adam, "muon": _muon(config.muon_beta)}, _kinds)


def _kinds(params: Params) -> Params:
    """Which leaves Muon moves: matrices of the layers. Embedding and head are tables of vectors."""
    kinds = jax.tree.map(lambda _: "adam", params)
    inside = lambda leaf: "muon" if leaf.ndim == 2 else "adam"  # noqa: E731
    return kinds | {"layers": jax.tree.map(inside, params["layers"])}


def _muon(beta: float) -> optax.GradientTransformation:
    """Momentum, orthogonalised by five Newton-Schulz steps (Jordan 2024), of one size everywhere.

    An orthogonal [a, b] has entries of root mean square 1 / sqrt(max(a, b)).
    """
    scale = lambda u: u * (MUON_RMS * max(u.shape) ** 0.5)  # noqa: E731
    dims = optax.contrib.MuonDimensionNumbers()
    return optax.chain(
        optax.contrib.scale_by_muon(
            beta=beta, weight_dimension_numbers=lambda tree: jax.tree.map(lambda _: dims, tree)
        ),
        optax.stateless(lambda updates, _: jax.tree.map(scale, updates)),
    )
