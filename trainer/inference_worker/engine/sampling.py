"""Drawing tokens on the device, with the log-probs of what was really drawn from.

A slot's draw depends only on its logits, its seed and the token's position: never on the slot, the
batch or the time. Two uniforms pick first a chunk of the vocabulary and then a token in it, by
inverse distribution: one pass over the logits, where Gumbel noise would cost a hash per entry.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from trainer.model.attention import MASKED


class Sampler(NamedTuple):
    """Per-slot settings, all arrays [slots]."""

    seed: jax.Array
    """uint32"""
    temperature: jax.Array
    """float32; 0 is greedy, with the log-probs of temperature 1."""
    top_p: jax.Array
    """float32; 1 keeps everything."""
    top_k: jax.Array
    """int32; 0 keeps everything."""


class Draw(NamedTuple):
    """What was drawn, arrays [slots]."""

    token: jax.Array
    """int32"""
    behaviour: jax.Array
    """float32 log-prob under the distribution drawn from (after top-p and top-k)."""
    raw: jax.Array
    """float32 log-prob under the temperature alone."""


def draw_tokens(logits: jax.Array, sampler: Sampler, positions: jax.Array) -> Draw:
    """Draw one token per slot.

    Args:
        logits: float32[slots, V].
        positions: int32[slots], the position in its sequence of the token to be drawn.
    """
    greedy = sampler.temperature == 0
    scaled = logits / jnp.where(greedy, 1.0, sampler.temperature)[:, None]
    top = scaled.max(axis=-1)
    # Not normalised: drawing needs the sums only, so each exponential is computed once.
    weights = jnp.exp(scaled - top[:, None])
    raw_sum = weights.sum(axis=-1)
    truncates = ~greedy & ((sampler.top_p < 1) | (sampler.top_k > 0))

    def truncated() -> tuple[jax.Array, jax.Array]:
        cutoffs = _cutoffs(scaled, sampler, truncates)[:, None]
        kept = jnp.where(scaled >= cutoffs, weights, 0.0)
        # What others in the batch ask for must not change a slot's sum by a rounding.
        return kept, jnp.where(truncates, kept.sum(axis=-1), raw_sum)

    # The sort that truncation needs, and the best token, are paid only while a slot asks for them.
    kept, kept_sum = jax.lax.cond(truncates.any(), truncated, lambda: (weights, raw_sum))
    best = jax.lax.cond(
        greedy.any(), lambda: jnp.argmax(logits, axis=-1), lambda: jnp.zeros(greedy.shape, int)
    )
    uniforms = jax.vmap(_uniforms)(sampler.seed, positions)
    sampled = jax.vmap(_inverse_draw)(kept, uniforms)
    token = jnp.where(greedy, best, sampled).astype(jnp.int32)
    chosen = jnp.take_along_axis(scaled, token[:, None], axis=-1)[:, 0] - top
    return Draw(token, chosen - jnp.log(kept_sum), chosen - jnp.log(raw_sum))


def _uniforms(seed: jax.Array, position: jax.Array) -> jax.Array:
    return jax.random.uniform(jax.random.fold_in(jax.random.key(seed), position), (2,))


def _inverse_draw(weights: jax.Array, uniforms: jax.Array) -> jax.Array:
    """Draw an index in proportion to ``weights`` [V]: the first whose running sum is over a target.

    ``u * total`` with u < 1 stays below the last running sum, so an entry of weight zero is never
    drawn. The second uniform is fresh: rare tokens keep their full resolution.
    """
    size = 1 << (max(weights.shape[0] - 1, 1).bit_length() + 1) // 2
    chunks = jnp.pad(weights, (0, -weights.shape[0] % size)).reshape(-1, size)
    sums = jnp.cumsum(chunks.sum(axis=1))
    chunk = jnp.sum(sums <= uniforms[0] * sums[-1])
    within = jnp.cumsum(chunks[chunk])
    return chunk * size + jnp.sum(within <= uniforms[1] * within[-1])


def _cutoffs(scaled: jax.Array, sampler: Sampler, truncates: jax.Array) -> jax.Array:
    """The smallest kept logit of each slot: top-k first, then top-p over what is left.

    Top-p keeps the most probable tokens up to and including the one that reaches it; tokens equal
    to the cutoff are all kept.
    """
    ordered = -jnp.sort(-scaled, axis=-1)
    rank = jnp.arange(scaled.shape[-1])
    limit = jnp.where(sampler.top_k > 0, sampler.top_k, scaled.shape[-1])
    in_k = rank < limit[:, None]
    probs = jax.nn.softmax(jnp.where(in_k, ordered, MASKED), axis=-1)
    before = jnp.cumsum(probs, axis=-1) - probs
    kept = in_k & (before < sampler.top_p[:, None])
    last = jnp.maximum(kept.sum(axis=-1) - 1, 0)
    cutoff = jnp.take_along_axis(ordered, last[:, None], axis=-1)[:, 0]
    return jnp.where(truncates, cutoff, MASKED)
