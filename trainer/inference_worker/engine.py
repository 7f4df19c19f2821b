"""The engine: packed prefill, insertion of one prefix into many slots, one token per step.

    prompts --prefill_batch--> prefixes --bulk_insert--> decode state --generate--> ResultTokens
                                                             ^   (donated)   |
                                                             +---------------+

Prompts that wait together are packed into one row (segments keep them apart), so there is one
compiled prefill per power of two of tokens, not per batch size and length, and little padding. The
last prompt token is not prefilled: the first ``generate`` runs it in every slot, and draws n
different first tokens from one prefix. Parameters are an argument of every call, so a swap is
another pytree of the same shapes and never compiles again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from trainer.inference_worker.config import InferenceConfig
from trainer.inference_worker.engine_api import ResultTokens, SlotSampling
from trainer.inference_worker.sampling import Sampler, draw_tokens
from trainer.model.config import ModelConfig
from trainer.model.decode import Cache, copy_prefix, decode_hidden, empty_cache, prefill_packed
from trainer.model.params_io import from_named, named_leaves, param_shapes
from trainer.model.transformer import Params, head_logits

SMALLEST_ROW = 32


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

    packed: Cache
    start: int
    """Its first token in the row."""
    last_token: int
    length: int
    """Prompt tokens, the last one included."""


class Inserts(NamedTuple):
    """What one insertion call writes, arrays [slots]; only the first ``count`` entries count."""

    slot: jax.Array
    start: jax.Array
    token: jax.Array
    position: jax.Array
    sampler: Sampler


class DecoderEngine:
    """The one engine of this project; satisfies ``engine_api.Engine``."""

    def __init__(self, config: ModelConfig, settings: InferenceConfig) -> None:
        self._config = config
        self._settings = settings
        self._params: Params | None = None
        self.version = -1
        self.max_concurrent_decodes = settings.slots
        self.max_prefill_length = settings.max_len - 1
        self._prefill = jax.jit(partial(_prefill, config))
        self._insert = jax.jit(_insert, donate_argnums=0)
        self._generate = jax.jit(partial(_generate, config), donate_argnums=1)

    def load_params(self, arrays: dict[str, np.ndarray]) -> Params:
        """Turn named arrays into parameters on the device; the layers' matrices in our dtype."""
        params = from_named(self._config, arrays)
        if self._settings.dtype == "bfloat16":
            cast = lambda leaf: leaf.astype(jnp.bfloat16) if leaf.ndim == 2 else leaf  # noqa: E731
            params["layers"] = jax.tree.map(cast, params["layers"])
        return params

    def update_params(self, params: Params, version: int) -> None:
        """Use these from the next call on; prefixes computed before are stale."""
        self._params = params
        self.version = version

    def warm_up(self) -> None:
        """Compile, on zeros, what prompts up to ``prefill_tokens`` need; later calls never do."""
        shapes = param_shapes(self._config)
        zeros = {name: np.zeros(leaf.shape, np.float32) for name, leaf in named_leaves(shapes)}
        kept, self._params = self._params, self.load_params(zeros)
        state = self.init_decode_state()
        width = SMALLEST_ROW
        while width < 2 * self._settings.prefill_tokens:
            packed = self._prefill(self._params, np.zeros((3, width), np.int32))
            prefix = Prefix(packed, start=0, last_token=0, length=1)
            state = self.insert(prefix, state, 0, SlotSampling(seed=0))
            width *= 2
        state, result = self.generate(state)
        result.convert_to_numpy()
        self._params = kept

    def init_decode_state(self) -> DecodeState:
        """All slots empty. An empty slot computes rubbish that nobody reads."""
        n = self.max_concurrent_decodes
        sampler = Sampler(
            seed=jnp.zeros(n, jnp.uint32),
            temperature=jnp.ones(n, jnp.float32),
            top_p=jnp.ones(n, jnp.float32),
            top_k=jnp.zeros(n, jnp.int32),
        )
        cache = empty_cache(self._config, n, self._settings.max_len)
        return DecodeState(cache, jnp.zeros(n, jnp.int32), jnp.zeros(n, jnp.int32), sampler)

    def prefill(self, *, padded_tokens: np.ndarray, true_length: int) -> Prefix:
        """Compute the prefix of one prompt."""
        return self.prefill_batch([padded_tokens[:true_length]])[0]

    def prefill_batch(self, prompts: Sequence[np.ndarray]) -> list[Prefix]:
        """Compute prefixes, packing as many prompts into a row as ``prefill_tokens`` allows.

        Raises:
            ValueError: a prompt is empty or longer than ``max_prefill_length``.
        """
        for prompt in prompts:
            if not 1 <= len(prompt) <= self.max_prefill_length:
                raise ValueError(
                    f"prompt of {len(prompt)} tokens; 1 to {self.max_prefill_length} fit "
                    f"(max_len = {self._settings.max_len} holds prompt and response)"
                )
        prefixes: list[Prefix] = []
        for pack in _packs(prompts, self._settings.prefill_tokens):
            row, starts = _row(pack)
            packed = self._prefill(self._params, row)
            prefixes += [
                Prefix(packed, start, int(prompt[-1]), len(prompt))
                for prompt, start in zip(pack, starts, strict=True)
            ]
        return prefixes

    def insert(
        self, prefix: Prefix, decode_state: DecodeState, slot: int, sampling: SlotSampling
    ) -> DecodeState:
        """Put one prefix into one slot."""
        return self.bulk_insert([prefix], decode_state, [slot], [sampling])

    def bulk_insert(
        self,
        prefixes: Sequence[Prefix],
        decode_state: DecodeState,
        slots: Sequence[int],
        samplings: Sequence[SlotSampling],
    ) -> DecodeState:
        """Fill many slots; one compiled call per packed row that the prefixes lie in."""
        rows: dict[int, list[tuple[Prefix, int, SlotSampling]]] = {}
        for entry in zip(prefixes, slots, samplings, strict=True):
            rows.setdefault(id(entry[0].packed), []).append(entry)
        for entries in rows.values():
            packed, count = entries[0][0].packed, np.int32(len(entries))
            inserts = _inserts(entries, self.max_concurrent_decodes)
            decode_state = self._insert(decode_state, packed, count, inserts)
        return decode_state

    def generate(self, decode_state: DecodeState) -> tuple[DecodeState, ResultTokens]:
        """Run the newest token of every slot and draw the next one."""
        state, data = self._generate(self._params, decode_state)
        return state, ResultTokens(data, self.version)


def _packs(prompts: Sequence[np.ndarray], budget: int) -> list[list[np.ndarray]]:
    """Cut the prompts, in order, into runs of at most ``budget`` tokens (a longer one alone)."""
    packs: list[list[np.ndarray]] = []
    used = 0
    for prompt in prompts:
        if not packs or used + len(prompt) - 1 > budget:
            packs.append([])
            used = 0
        packs[-1].append(prompt)
        used += len(prompt) - 1
    return packs


def _row(pack: Sequence[np.ndarray]) -> tuple[np.ndarray, list[int]]:
    """Pack prompts, without their last tokens, into int32[3, T]: tokens, positions, segments."""
    lengths = [len(prompt) - 1 for prompt in pack]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    width = (
        max(SMALLEST_ROW, 1 << (int(starts[-1]) - 1).bit_length()) if starts[-1] else SMALLEST_ROW
    )
    row = np.zeros((3, width), np.int32)
    for i, (prompt, start, length) in enumerate(zip(pack, starts, lengths, strict=False)):
        row[0, start : start + length] = prompt[:-1]
        row[1, start : start + length] = np.arange(length)
        row[2, start : start + length] = i + 1
    return row, [int(start) for start in starts[:-1]]


def _prefill(config: ModelConfig, params: Params, row: jax.Array) -> Cache:
    return prefill_packed(params, config, *row)


def _inserts(entries: Sequence[tuple[Prefix, int, SlotSampling]], slots: int) -> Inserts:
    """Columns of one call, filled up to a length that never changes."""

    def column(values: Sequence[float], dtype: type, fill: int = 0) -> np.ndarray:
        padded = np.full(slots, fill, dtype)
        padded[: len(values)] = values
        return padded

    prefixes, targets, samplings = zip(*entries, strict=True)
    return Inserts(
        slot=column(targets, np.int32, fill=slots),  # out of range: JAX drops such writes
        start=column([p.start for p in prefixes], np.int32),
        token=column([p.last_token for p in prefixes], np.int32),
        position=column([p.length - 1 for p in prefixes], np.int32),
        sampler=Sampler(
            seed=column([s.seed for s in samplings], np.uint32),
            temperature=column([s.temperature for s in samplings], np.float32),
            top_p=column([s.top_p for s in samplings], np.float32),
            top_k=column([s.top_k for s in samplings], np.int32),
        ),
    )


def _insert(state: DecodeState, packed: Cache, count: jax.Array, new: Inserts) -> DecodeState:
    cache = jax.lax.fori_loop(
        0, count, lambda i, c: copy_prefix(c, packed, new.start[i], new.slot[i]), state.cache
    )

    def put(column: jax.Array, values: jax.Array) -> jax.Array:
        return column.at[new.slot].set(values, mode="drop")

    return DecodeState(
        cache,
        put(state.token, new.token),
        put(state.position, new.position),
        jax.tree.map(put, state.sampler, new.sampler),
    )


def _generate(
    config: ModelConfig, params: Params, state: DecodeState
) -> tuple[DecodeState, jax.Array]:
    hidden, cache = decode_hidden(params, config, state.cache, state.token, state.position)
    # The draw's counter is the position that the drawn token will take.
    draw = draw_tokens(head_logits(params, config, hidden), state.sampler, state.position + 1)
    # A finished slot runs on until it is filled again; it must not write past its end.
    position = jnp.minimum(state.position + 1, cache.keys[0].shape[3] - 1)
    data = jnp.stack([draw.token.astype(jnp.float32), draw.behaviour, draw.raw])
    return DecodeState(cache, draw.token, position, state.sampler), data
