"""The decode state, and the pure functions that change it: prefixes inserted, tokens drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from trainer.inference_worker.engine.engine_api import SlotSampling
from trainer.inference_worker.engine.sampling import Sampler, draw_tokens, sampler_of
from trainer.inference_worker.engine.thinking import follow
from trainer.model.config import ModelConfig
from trainer.model.decode import decode_hidden
from trainer.model.kv_cache import Cache, PackedCache, copy_prefix
from trainer.model.transformer import Params, head_logits


class DecodeState(NamedTuple):
    """What a step reads and writes."""

    cache: Cache
    token: jax.Array
    """int32[slots], to be run next: the last prompt token, or the last one drawn."""
    position: jax.Array
    """int32[slots], where ``token`` stands in its sequence."""
    sampler: Sampler


class Prefix(NamedTuple):
    """One prompt within a packed row."""

    packed: PackedCache
    shared: int
    """Its first tokens that all prompts of the row begin with: the row's first."""
    own: int
    """Its token i beyond those is the row's token ``own + i``."""
    last_token: int
    length: int
    """Prompt tokens, the last one included."""


class Inserts(NamedTuple):
    """What one insertion call writes, arrays [slots]; only the first ``count`` entries count."""

    slot: jax.Array
    shared: jax.Array
    own: jax.Array
    token: jax.Array
    position: jax.Array
    sampler: Sampler


def inserts_of(entries: Sequence[tuple[Prefix, int, SlotSampling]], slots: int) -> Inserts:
    """Columns of one call, filled up to a length that never changes."""

    def column(values: Sequence[float], dtype: type, fill: int = 0) -> np.ndarray:
        padded = np.full(slots, fill, dtype)
        padded[: len(values)] = values
        return padded

    prefixes, targets, samplings = zip(*entries, strict=True)
    return Inserts(
        slot=column(targets, np.int32, fill=slots),  # out of range: JAX drops such writes
        shared=column([p.shared for p in prefixes], np.int32),
        own=column([p.own for p in prefixes], np.int32),
        token=column([p.last_token for p in prefixes], np.int32),
        position=column([p.length - 1 for p in prefixes], np.int32),
        sampler=sampler_of(samplings, slots),
    )


def insert_prefixes(
    state: DecodeState, packed: PackedCache, count: jax.Array, new: Inserts
) -> DecodeState:
    """Write the first ``count`` of ``new``, whose prompts lie in ``packed``, into their slots."""

    def copy(i: jax.Array, cache: Cache) -> Cache:
        return copy_prefix(cache, packed, new.shared[i], new.own[i], new.slot[i])

    cache = jax.lax.fori_loop(0, count, copy, state.cache)

    def put(column: jax.Array, values: jax.Array) -> jax.Array:
        return column.at[new.slot].set(values, mode="drop")

    return DecodeState(
        cache,
        put(state.token, new.token),
        put(state.position, new.position),
        jax.tree.map(put, state.sampler, new.sampler),
    )


def decode_steps(
    config: ModelConfig, steps: int, params: Params, state: DecodeState, rows: jax.Array
) -> tuple[DecodeState, jax.Array]:
    """Draw ``steps`` tokens in the slots ``rows`` (see ``decode_hidden``), as ``ResultTokens``."""
    if steps == 1:
        return _step(config, params, state, rows)
    found = []
    for _ in range(steps):  # unrolled: a loop would be slower, its carry is copied
        state, data = _step(config, params, state, rows)
        found.append(data)
    return state, jnp.stack(found)


def _step(
    config: ModelConfig, params: Params, state: DecodeState, rows: jax.Array
) -> tuple[DecodeState, jax.Array]:
    slots = state.token.size

    def take(column: jax.Array) -> jax.Array:
        return column if rows.size == slots else column.at[rows].get(mode="clip")

    def put(column: jax.Array, values: jax.Array) -> jax.Array:
        return column.at[rows].set(values, mode="drop")

    position, sampler = take(state.position), jax.tree.map(take, state.sampler)
    hidden, cache = decode_hidden(params, config, state.cache, take(state.token), position, rows)
    # The draw's counter is the position that the drawn token will take.
    draw = draw_tokens(head_logits(params, config, hidden), sampler, position + 1)
    # A slot that runs on after its end must not write past its last place.
    position = jnp.minimum(position + 1, cache.max_len - 1)
    columns = (draw.token.astype(jnp.float32), draw.behaviour, draw.raw)
    data = jnp.stack([put(jnp.zeros(slots), column) for column in columns])
    thinking, old = follow(sampler.thinking, draw.token), state.sampler.thinking
    thinking = old._replace(
        recent=put(old.recent, thinking.recent), thought=put(old.thought, thinking.thought)
    )
    moved = DecodeState(
        cache,
        put(state.token, draw.token),
        put(state.position, position),
        state.sampler._replace(thinking=thinking),
    )
    return moved, data
