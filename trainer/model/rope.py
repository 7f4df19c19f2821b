"""Rotary positions: tables of cosines and sines for each kind of layer, and the rotation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from trainer.model.config import LinearScaling, ModelConfig, RopeScaling


def rope_tables(
    config: ModelConfig, positions: jax.Array, *, sliding: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines, float32[..., head_dim // 2], for absolute ``positions``.

    ``sliding``: those of layers with a window, where they have a base of their own (Gemma 3).
    """
    exponents = np.arange(0, config.head_dim, 2) / config.head_dim
    if sliding and config.window_rope_theta is not None:
        frequencies = config.window_rope_theta**-exponents
    else:
        frequencies = _scaled(config.rope_theta**-exponents, config.rope_scaling)
    angles = positions[..., None].astype(jnp.float32) * jnp.asarray(frequencies, jnp.float32)
    return jnp.cos(angles), jnp.sin(angles)


def layer_ropes(config: ModelConfig, positions: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
    """The rotary tables of every layer; layers of one kind share them."""
    tables = {s: rope_tables(config, positions, sliding=s) for s in sorted(set(config.sliding))}
    return [tables[s] for s in config.sliding]


def _scaled(frequencies: np.ndarray, scaling: RopeScaling | LinearScaling | None) -> np.ndarray:
    """Linear: divide by ``factor``. Llama 3.1: divide slow frequencies by ``factor``, keep fast
    ones, blend in between."""
    if scaling is None:
        return frequencies
    if isinstance(scaling, LinearScaling):
        return frequencies / scaling.factor
    turns = scaling.original_max_len * frequencies / (2 * np.pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return frequencies * (blend + (1 - blend) / scaling.factor)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotary embedding in the half-split ("rotate half") convention; x is [B,L,heads,Dh]."""
    a, b = jnp.split(x, 2, axis=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
