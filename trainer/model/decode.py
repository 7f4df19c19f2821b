"""The decoder with a key/value cache: prefill of packed prompts, and one token for every slot.

Layers are unrolled: scanning over stacked layers costs a third in decoding.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from trainer.model.attention import layer_masks, layer_visible, masked_attention
from trainer.model.config import ModelConfig
from trainer.model.kv_cache import (
    Blocks,
    Cache,
    PackedCache,
    attend_blocks,
    spans_of,
    write_token,
)
from trainer.model.rope import layer_ropes
from trainer.model.transformer import Params, block, embed, norm


def prefill_packed(
    params: Params,
    config: ModelConfig,
    tokens: jax.Array,
    positions: jax.Array,
    segments: jax.Array,
    prefixes: jax.Array,
) -> PackedCache:
    """Compute keys and values of several prompts packed into one row.

    Args:
        tokens, positions, segments, prefixes: int32[T], as in ``hidden_states``.

    Returns:
        Keys float32[KVH, Dh, 2T] and values float32[KVH, 2T, Dh] per layer; the second half is
        empty, so that a window as long as the row may start at any token.
    """
    masks = layer_masks(config, positions[None], segments[None], prefixes[None])
    ropes = layer_ropes(config, positions[None])
    x = embed(params, config, tokens[None])
    keys, values = [], []
    for layer, rope, mask in zip(params["layers"], ropes, masks, strict=True):
        x, k, v = _prefill_block(layer, config, x, rope, mask)
        keys.append(k)
        values.append(v)  # what only the last x needs, XLA drops
    return PackedCache(tuple(keys), tuple(values))


@partial(jax.jit, static_argnums=1)
def _prefill_block(
    layer: Params,
    config: ModelConfig,
    x: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    mask: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One block on the packed row, with its keys and values in the cache's layout.

    An inner jit is traced once for all layers: 30 times less of what starting a worker waits for.
    """
    kept: list[jax.Array] = []
    room = (0, x.shape[1])

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        kept.append(jnp.pad(k[0].transpose(1, 2, 0), ((0, 0), (0, 0), room)))
        kept.append(jnp.pad(v[0].transpose(1, 0, 2), ((0, 0), room, (0, 0))))
        return masked_attention(config, q, k, v, mask)

    x = block(layer, config, x, rope, attend)
    return x, kept[0], kept[1]


def prefill_chunk(
    params: Params, config: ModelConfig, past: PackedCache, tokens: jax.Array, start: jax.Array
) -> PackedCache:
    """Go on with one long prompt: ``tokens`` int32[T] stand at ``start`` and after it.

    Args:
        past: as ``prefill_packed`` returns it, with the keys and values of the first ``start``.
            Donate it. Its first half must have room for all ``T`` tokens.
    """
    positions = start + jnp.arange(tokens.size)
    visible = layer_visible(config, positions, past.keys[0].shape[2] // 2)
    ropes = layer_ropes(config, positions[None])
    x = embed(params, config, tokens[None])
    keys, values = [], []
    parts = (params["layers"], ropes, visible, past.keys, past.values)
    for layer, rope, seen, k, v in zip(*parts, strict=True):
        x, k, v = _chunk_block(layer, config, x, rope, seen[None], k, v, start)
        keys.append(k)
        values.append(v)
    return PackedCache(tuple(keys), tuple(values))


@partial(jax.jit, static_argnums=1)
def _chunk_block(
    layer: Params,
    config: ModelConfig,
    x: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    mask: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    start: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One block on the chunk, after writing its keys and values behind the earlier ones."""
    kept: list[jax.Array] = []

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        k, v = k[0].transpose(1, 2, 0), v[0].transpose(1, 0, 2)
        kept.append(jax.lax.dynamic_update_slice(keys, k, (0, 0, start)))
        kept.append(jax.lax.dynamic_update_slice(values, v, (0, start, 0)))
        room = mask.shape[2]
        k, v = kept[0][:, :, :room].transpose(2, 0, 1), kept[1][:, :room].transpose(1, 0, 2)
        return masked_attention(config, q, k[None], v[None], mask)

    x = block(layer, config, x, rope, attend)
    return x, kept[0], kept[1]


def decode_hidden(
    params: Params,
    config: ModelConfig,
    cache: Cache,
    tokens: jax.Array,
    positions: jax.Array,
    rows: jax.Array,
) -> tuple[jax.Array, Cache]:
    """Run one token of each slot in ``rows``; write its key and value on the way.

    Args:
        tokens, positions: int32[rows], what runs and where it stands in its sequence.
        rows: int32[rows], distinct slots; out of range: computes rubbish and writes nothing. As
            many rows as slots must stand in order, each at its own index.

    Returns:
        float32[rows, D] after the final norm, and the new cache.
    """
    with jax.ensure_compile_time_eval():
        # Tables to look up: else every layer computes its cosines again, fused into its rotation
        # (16 ms of 96 rows).
        tables = layer_ropes(config, jnp.arange(cache.max_len))
    visible = layer_visible(config, positions, cache.max_len)
    x = embed(params, config, tokens[:, None])
    keys, values = [], []
    parts = (params["layers"], tables, visible, cache.keys, cache.values)
    for layer, table, seen, k, v in zip(*parts, strict=True):
        rope = tuple(half[positions[:, None]] for half in table)
        x, k, v = _decode_block(layer, config, x, rope, seen, k, v, positions, rows)
        keys.append(k)
        values.append(v)
    return norm(config, x[:, 0], params["norm"]), Cache(tuple(keys), tuple(values))


@partial(jax.jit, static_argnums=1)
def _decode_block(
    layer: Params,
    config: ModelConfig,
    x: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    visible: jax.Array,
    keys: Blocks,
    values: Blocks,
    positions: jax.Array,
    rows: jax.Array,
) -> tuple[jax.Array, Blocks, Blocks]:
    """One block on one token of each row, which first writes its key and value."""
    kept: list[Blocks] = []
    seen = visible & (rows < keys[0].shape[0])[:, None]
    needed = jnp.stack([seen[:, start:end].any() for start, end in spans_of(visible.shape[1])])

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        kept.extend(write_token(keys, values, k[:, 0], v[:, 0], positions, rows))
        return attend_blocks(config, q[:, 0], *kept, rows, visible, needed)[:, None]

    x = block(layer, config, x, rope, attend)
    return x, kept[0], kept[1]
