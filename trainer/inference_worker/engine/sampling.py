"""Drawing tokens on the device, with the log-probs of what was really drawn from.

A slot's draw depends only on its logits, its settings, its seed and the token's position: never on
the slot, the batch or the time. Two uniforms pick first a chunk of the vocabulary and then a token
in it, by inverse distribution: one pass over the logits, where Gumbel noise would cost a hash per
entry. Biases and truncation are paid only while a slot of the step asks for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from infra.contracts.sampling_params import MAX_BIASED
from trainer.inference_worker.engine.engine_api import SlotSampling
from trainer.inference_worker.engine.thinking import Thinking, columns_of, forced_tokens
from trainer.model.attention import MASKED


class Sampler(NamedTuple):
    """Per-slot settings, all arrays [slots] but the biases'."""

    seed: jax.Array
    """uint32"""
    temperature: jax.Array
    """float32; 0 is greedy, with the log-probs of temperature 1."""
    top_p: jax.Array
    """float32; 1 keeps everything."""
    top_k: jax.Array
    """int32; 0 keeps everything."""
    min_p: jax.Array
    """float32; 0 keeps everything."""
    biased: jax.Array
    """int32[slots, MAX_BIASED], token ids."""
    bias: jax.Array
    """float32[slots, MAX_BIASED], added to their logits; -inf bans."""
    until: jax.Array
    """int32[slots, MAX_BIASED]: only while the token to be drawn stands before this position."""
    thinking: Thinking
    """The one part that steps change."""


class Draw(NamedTuple):
    """What was drawn, arrays [slots]."""

    token: jax.Array
    """int32"""
    behaviour: jax.Array
    """float32 log-prob under the distribution drawn from: after bans, biases and truncation."""
    raw: jax.Array
    """float32 log-prob under the temperature alone. Both are 0 where the token was forced."""


def sampler_of(samplings: Sequence[SlotSampling], count: int) -> Sampler:
    """Columns of length ``count`` as numpy arrays; the rest is temperature 1 and nothing else."""

    def column(name: str, dtype: type, fill: float = 0) -> np.ndarray:
        values = np.full(count, fill, dtype)
        values[: len(samplings)] = [getattr(sampling, name) for sampling in samplings]
        return values

    shape = (count, MAX_BIASED)
    biased, bias = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    until = np.zeros(shape, np.int32)
    for i, sampling in enumerate(samplings):
        for j, entry in enumerate(sampling.biases):
            biased[i, j], bias[i, j], until[i, j] = entry
    return Sampler(
        seed=column("seed", np.uint32),
        temperature=column("temperature", np.float32, 1),
        top_p=column("top_p", np.float32, 1),
        top_k=column("top_k", np.int32),
        min_p=column("min_p", np.float32),
        biased=biased,
        bias=bias,
        until=until,
        thinking=columns_of([sampling.thinking for sampling in samplings], count),
    )


def draw_tokens(logits: jax.Array, sampler: Sampler, positions: jax.Array) -> Draw:
    """Draw one token per slot.

    Args:
        logits: float32[slots, V].
        positions: int32[slots], the position in its sequence of the token to be drawn.
    """
    greedy = sampler.temperature == 0
    heat = jnp.where(greedy, 1.0, sampler.temperature)
    scaled = logits / heat[:, None]
    top = scaled.max(axis=-1)
    # Not normalised: drawing needs the sums only, so each exponential is computed once.
    weights = jnp.exp(scaled - top[:, None])
    raw_sum = weights.sum(axis=-1)
    applies = sampler.until > positions[:, None]
    biases = applies.any(axis=-1)
    truncates = ~greedy & ((sampler.top_p < 1) | (sampler.top_k > 0) | (sampler.min_p > 0))
    bias = jnp.where(applies, sampler.bias, 0.0) / heat[:, None]

    def shaped() -> tuple[jax.Array, jax.Array, jax.Array]:
        """Weights, their sum and what they are relative to, where something is asked for."""
        held, height, kept = jax.lax.cond(
            biases.any(),
            lambda: _biased(scaled, weights, top, sampler.biased, bias, biases),
            lambda: (scaled, top, weights),
        )
        cutoffs = _cutoffs(held, height, kept, sampler, truncates)[:, None]
        kept = jnp.where(held >= cutoffs, kept, 0.0)
        # What others in the batch ask for must not change a slot's sum by a rounding.
        return kept, jnp.where(truncates | biases, kept.sum(axis=-1), raw_sum), height

    kept, kept_sum, height = jax.lax.cond(
        (truncates | biases).any(), shaped, lambda: (weights, raw_sum, top)
    )
    best = jax.lax.cond(
        greedy.any(), lambda: _best(logits, kept, biases), lambda: jnp.zeros(greedy.shape, int)
    )
    uniforms = jax.vmap(_uniforms)(sampler.seed, positions)
    sampled = jax.vmap(_inverse_draw)(kept, uniforms)
    token = jnp.where(greedy, best, sampled).astype(jnp.int32)
    forced, forced_token = forced_tokens(sampler.thinking)
    token = jnp.where(forced, forced_token, token)
    logit = jnp.take_along_axis(scaled, token[:, None], axis=-1)[:, 0]
    added = jnp.where(sampler.biased == token[:, None], bias, 0.0).sum(axis=-1)
    behaviour = logit + added - height - jnp.log(kept_sum)
    raw = logit - top - jnp.log(raw_sum)
    return Draw(token, jnp.where(forced, 0.0, behaviour), jnp.where(forced, 0.0, raw))


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


def _best(logits: jax.Array, kept: jax.Array, biases: jax.Array) -> jax.Array:
    """The best token [slots]; by its weight where biases moved the logits."""
    return jnp.where(biases, jnp.argmax(kept, axis=-1), jnp.argmax(logits, axis=-1))


def _biased(
    scaled: jax.Array,
    weights: jax.Array,
    top: jax.Array,
    ids: jax.Array,
    bias: jax.Array,
    biases: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Scaled logits with their biases, their tops and weights; of other slots as they were."""
    rows = jnp.arange(ids.shape[0])[:, None]
    held = jnp.where(biases[:, None], scaled.at[rows, ids].add(bias), scaled)
    height = jnp.where(biases, held.max(axis=-1), top)
    moved = jnp.exp(held - height[:, None])
    return held, height, jnp.where(biases[:, None], moved, weights)


def _cutoffs(
    scaled: jax.Array, top: jax.Array, weights: jax.Array, sampler: Sampler, truncates: jax.Array
) -> jax.Array:
    """The smallest kept logit of each slot: top-k, top-p over what is left, and min-p beside them.

    Top-k keeps the k most probable tokens; top-p those up to and including the one that reaches it;
    min-p those of at least its share of the most probable one. Tokens equal to the cutoff are all
    kept. ``weights`` are exp(scaled - top).
    """
    top_k, top_p = truncates & (sampler.top_k > 0), truncates & (sampler.top_p < 1)
    order = _in_order(scaled)
    nothing = jnp.zeros(top.shape, jnp.uint32)

    def of_k() -> jax.Array:
        ones = jnp.ones_like(weights)
        return jnp.where(top_k, _largest(order, ones, sampler.top_k.astype(jnp.float32)), nothing)

    def of_p(least: jax.Array) -> jax.Array:
        left = jnp.where(order >= least[:, None], weights, 0.0)
        found = _largest(order, left, sampler.top_p * left.sum(axis=-1))
        return jnp.where(top_p, jnp.maximum(found, least), least)

    least = jax.lax.cond(top_k.any(), of_k, lambda: nothing)
    least = jax.lax.cond(top_p.any(), of_p, lambda least: least, least)
    # The cutoff is a logit of the slot: the least one that is not below.
    ranked = jnp.where(order >= least[:, None], scaled, jnp.inf).min(axis=-1)
    near = jnp.where(sampler.min_p > 0, top + jnp.log(sampler.min_p), MASKED)
    cutoff = jnp.maximum(jnp.where(top_k | top_p, ranked, MASKED), near)
    return jnp.where(truncates, cutoff, MASKED)


def _in_order(values: jax.Array) -> jax.Array:
    """float32 as uint32 of the same order."""
    bits = jax.lax.bitcast_convert_type(values, jnp.int32)
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return jax.lax.bitcast_convert_type(rising, jnp.uint32) ^ jnp.uint32(1 << 31)


def _largest(order: jax.Array, weights: jax.Array, goal: jax.Array) -> jax.Array:
    """The largest t of each row with sum(weights where order >= t) >= goal, bit by bit; else 0.

    Thirty-two passes, where sorting 49k logits takes as long as a hundred and fifty.
    """

    def bit(i: jax.Array, found: jax.Array) -> jax.Array:
        higher = found | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        reached = jnp.where(order >= higher[:, None], weights, 0.0).sum(axis=-1) >= goal
        return jnp.where(reached, higher, found)

    return jax.lax.fori_loop(0, 32, bit, jnp.zeros(goal.shape, jnp.uint32))
