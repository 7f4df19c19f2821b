"""Attention: what each layer may look at, and the softmax over it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from trainer.model.config import ModelConfig

MASKED = -1e30
"""Finite, so that a row that may attend to nothing (padding) yields no NaN."""


def attention_weights(config: ModelConfig, scores: jax.Array, mask: jax.Array) -> jax.Array:
    """Scale, cap, mask and normalise raw ``q . k`` scores; ``mask`` is true where allowed."""
    return jax.nn.softmax(attention_scores(config, scores, mask), axis=-1)


def attention_scores(config: ModelConfig, scores: jax.Array, mask: jax.Array) -> jax.Array:
    """The same, not normalised."""
    return jnp.where(mask, softcap(scores * config.query_scale, config.attn_softcap), MASKED)


def softcap(x: jax.Array, cap: float | None) -> jax.Array:
    """``cap * tanh(x / cap)``: bounded, almost linear around 0; without a cap x itself."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def masked_attention(
    config: ModelConfig, q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array
) -> jax.Array:
    """Softmax attention; query head h reads key/value head ``h // (heads // kv_heads)``.

    Args:
        q: [B,L,H,Dh]; k, v: [B,M,KVH,Dh]; mask: bool[B,L,M], true where attending is allowed.
    """
    b, n, heads, dh = q.shape
    q = q.reshape(b, n, k.shape[2], heads // k.shape[2], dh)
    scores = jnp.einsum("blkgd,bmkd->bkglm", q, k)
    weights = attention_weights(config, scores, mask[:, None, None])
    return jnp.einsum("bkglm,bmkd->blkgd", weights, v).reshape(b, n, heads, dh)


def attention_mask(segments: jax.Array, prefixes: jax.Array) -> jax.Array:
    """bool[B,L,L]: i attends to j iff j <= i, j is no padding, and j lies in i's segment or prefix.

    Several responses may branch from one prompt in a row: the prompt is a segment of its own, and
    each response names it as its prefix.
    """
    own = segments[:, :, None] == segments[:, None, :]
    prefix = prefixes[:, :, None] == segments[:, None, :]
    causal = jnp.tril(jnp.ones((segments.shape[1],) * 2, bool))
    return causal & (segments[:, None, :] != 0) & (own | prefix)


def layer_masks(
    config: ModelConfig, positions: jax.Array, segments: jax.Array, prefixes: jax.Array
) -> list[jax.Array]:
    """What every layer may attend to (see ``attention_mask``); layers of one kind share it."""
    mask = attention_mask(segments, prefixes)
    # By position in the sequence, not by place in the row: a response lies far from its prompt.
    distance = positions[:, :, None] - positions[:, None, :]
    return _each_layer(config, mask, distance)


def layer_visible(config: ModelConfig, positions: jax.Array, length: int) -> list[jax.Array]:
    """bool[rows, length] for every layer: the places of a slot's cache that its token looks at."""
    distance = positions[:, None] - jnp.arange(length)
    return _each_layer(config, distance >= 0, distance)


def _each_layer(config: ModelConfig, mask: jax.Array, distance: jax.Array) -> list[jax.Array]:
    """A window holds ``window`` tokens, the own one among them."""
    windowed = mask & (distance < config.window) if config.window_layers else mask
    return [windowed if sliding else mask for sliding in config.sliding]
