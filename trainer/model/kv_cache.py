"""Keys and values of all slots, and one token's attention over them.

Keys lie as [slots, KVH, Dh, places] and values as [slots, KVH, places, Dh]: on CPU attention over
them runs five times faster than over [slots, places, H, Dh]. A layer's places are cut into a few
blocks with buffers of their own, because a step attends only over blocks that some slot has reached
and a slice of one buffer would be copied. Each block yields its own softmax sums, which are then
merged in one order: a block that was left out adds exact zeros, so no slot's result depends on how
far the others are.
"""

from __future__ import annotations

from functools import partial, reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp

from trainer.model.attention import MASKED, attention_scores
from trainer.model.config import ModelConfig

SMALLEST_BLOCK = 64
MOST_BLOCKS = 4
"""More would follow the lengths more closely; each costs compile time in every layer."""

Blocks = tuple[jax.Array, ...]


class Cache(NamedTuple):
    """Keys and values of every slot, for every layer in blocks of places."""

    keys: tuple[Blocks, ...]
    """float32[slots, KVH, Dh, places of the block]"""
    values: tuple[Blocks, ...]
    """float32[slots, KVH, places of the block, Dh]"""

    @property
    def slots(self) -> int:
        return self.keys[0][0].shape[0]

    @property
    def max_len(self) -> int:
        return sum(block.shape[3] for block in self.keys[0])


class PackedCache(NamedTuple):
    """Keys and values of a packed row, one array per layer."""

    keys: tuple[jax.Array, ...]
    """float32[KVH, Dh, places]"""
    values: tuple[jax.Array, ...]
    """float32[KVH, places, Dh]"""


def spans_of(max_len: int) -> list[tuple[int, int]]:
    """First place and end of each block."""
    size = max(SMALLEST_BLOCK, -(-max_len // (MOST_BLOCKS * SMALLEST_BLOCK)) * SMALLEST_BLOCK)
    return [(start, min(start + size, max_len)) for start in range(0, max_len, size)]


def empty_cache(config: ModelConfig, slots: int, max_len: int) -> Cache:
    """A cache of zeros; always float32 (a scatter into bfloat16 converts all of it each step)."""
    c, sizes = config, [end - start for start, end in spans_of(max_len)]

    def keys() -> Blocks:
        return tuple(jnp.zeros((slots, c.kv_heads, c.head_dim, size)) for size in sizes)

    def values() -> Blocks:
        return tuple(jnp.zeros((slots, c.kv_heads, size, c.head_dim)) for size in sizes)

    return Cache(tuple(keys() for _ in range(c.layers)), tuple(values() for _ in range(c.layers)))


def empty_packed(config: ModelConfig, places: int) -> PackedCache:
    """A packed row of zeros."""
    c, layers = config, range(config.layers)
    return PackedCache(
        tuple(jnp.zeros((c.kv_heads, c.head_dim, places)) for _ in layers),
        tuple(jnp.zeros((c.kv_heads, places, c.head_dim)) for _ in layers),
    )


def copy_prefix(
    cache: Cache, packed: PackedCache, shared: jax.Array, own: jax.Array, slot: jax.Array
) -> Cache:
    """Copy one prompt from a packed row to the head of ``slot``.

    The prompt's first ``shared`` tokens are the row's first; its token i beyond them is the row's
    token ``own + i``. What follows the prompt in the copied window is another prompt's; no query
    ever looks there before it is overwritten, because slots attend only up to their own position.
    """
    width = min(cache.max_len, packed.keys[0].shape[2] // 2)
    in_shared = jnp.arange(width) < shared
    spans = spans_of(cache.max_len)

    def one(targets: Blocks, source: jax.Array, axis: int) -> Blocks:
        head = jax.lax.slice_in_dim(source, 0, width, axis=axis)
        rest = jax.lax.dynamic_slice_in_dim(source, own, width, axis)
        mask = in_shared if axis == 2 else in_shared[:, None]
        window = jnp.where(mask, head, rest)[None]
        filled = []
        for target, (start, end) in zip(targets, spans, strict=True):
            if start < width:
                part = jax.lax.slice_in_dim(window, start, min(end, width), axis=axis + 1)
                target = jax.lax.dynamic_update_slice(target, part, (slot, 0, 0, 0))
            filled.append(target)
        return tuple(filled)

    return Cache(
        tuple(one(t, s, 2) for t, s in zip(cache.keys, packed.keys, strict=True)),
        tuple(one(t, s, 1) for t, s in zip(cache.values, packed.values, strict=True)),
    )


def write_token(
    keys: Blocks, values: Blocks, k: jax.Array, v: jax.Array, positions: jax.Array, rows: jax.Array
) -> tuple[Blocks, Blocks]:
    """Write k, v [rows, KVH, Dh] where each row stands; rows out of range write nothing."""
    new_keys, new_values, start = [], [], 0
    for key, value in zip(keys, values, strict=True):
        size = key.shape[3]
        inside = (positions >= start) & (positions < start + size)
        place = jnp.where(inside, positions - start, size)  # out of range: dropped
        new_keys.append(key.at[rows, :, :, place].set(k, mode="drop"))
        new_values.append(value.at[rows, :, place, :].set(v, mode="drop"))
        start += size
    return tuple(new_keys), tuple(new_values)


class Sums(NamedTuple):
    """Softmax attention over some places, not yet divided: [rows, KVH, G, 1 or Dh]."""

    top: jax.Array
    """The largest score; the others are relative to it."""
    total: jax.Array
    mixed: jax.Array


def attend_blocks(
    config: ModelConfig,
    q: jax.Array,
    keys: Blocks,
    values: Blocks,
    rows: jax.Array,
    visible: jax.Array,
    needed: jax.Array,
) -> jax.Array:
    """Attention of one token per row: q [rows, H, Dh] -> [rows, H, Dh].

    Args:
        visible: bool[rows, max_len]; needed: bool[blocks], whether any row sees any of the block.
    """
    shape, start, parts = q.shape, 0, []
    q = q.reshape(q.shape[0], config.kv_heads, -1, config.head_dim)
    for i, (key, value) in enumerate(zip(keys, values, strict=True)):
        mask = visible[:, None, None, start : start + key.shape[3]]
        over = partial(_block_sums, config)
        operands = (q, key, value, rows, mask)
        parts.append(jax.lax.cond(needed[i], over, _no_sums, *operands) if i else over(*operands))
        start += key.shape[3]
    if len(parts) == 1:
        return (parts[0].mixed / parts[0].total).reshape(shape)
    top = reduce(jnp.maximum, (part.top for part in parts))
    scales = [jnp.exp(part.top - top) for part in parts]
    mixed = reduce(jnp.add, (part.mixed * s for part, s in zip(parts, scales, strict=True)))
    total = reduce(jnp.add, (part.total * s for part, s in zip(parts, scales, strict=True)))
    return (mixed / total).reshape(shape)


def _block_sums(
    config: ModelConfig,
    q: jax.Array,
    key: jax.Array,
    value: jax.Array,
    rows: jax.Array,
    mask: jax.Array,
) -> Sums:
    if rows.size < key.shape[0]:  # few rows are read as a copy
        key, value = (t.at[rows].get(mode="clip") for t in (key, value))
    scores = attention_scores(config, jnp.einsum("bkgd,bkds->bkgs", q, key), mask)
    top = scores.max(axis=-1, keepdims=True)
    weights = jnp.exp(scores - top)
    return Sums(
        top, weights.sum(axis=-1, keepdims=True), jnp.einsum("bkgs,bksd->bkgd", weights, value)
    )


def _no_sums(q: jax.Array, *_: jax.Array) -> Sums:
    """Those of a block that no row sees."""
    one = (*q.shape[:-1], 1)
    return Sums(jnp.full(one, MASKED), jnp.zeros(one), jnp.zeros(q.shape))
