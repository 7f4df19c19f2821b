"""The engine: packed prefill, insertion of one prefix into many slots, one token per step.

    prompts --prefill_batch--> prefixes --bulk_insert--> decode state --generate--> ResultTokens
                                                             ^   (donated)   |
                                                             +---------------+

Prompts that wait together are packed into one row (segments keep them apart), so there is one
compiled prefill per power of two of tokens, not per batch size and length, and little padding; what
all of them begin with (few-shot examples, a system turn) is computed once. The last prompt token is
not prefilled: the first ``generate`` runs it in every slot, and draws n different first tokens from
one prefix. Parameters are an argument of every call, so a swap is another pytree of the same shapes
and never compiles again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from trainer.inference_worker.config import InferenceConfig
from trainer.inference_worker.engine.decode_state import (
    DecodeState,
    Prefix,
    decode_steps,
    insert_prefixes,
    inserts_of,
)
from trainer.inference_worker.engine.engine_api import ResultTokens, SlotSampling
from trainer.inference_worker.engine.packed_row import SMALLEST_ROW, packed_row, packs_of
from trainer.inference_worker.engine.placement import Placement
from trainer.inference_worker.engine.sampling import sampler_of
from trainer.model.config import ModelConfig
from trainer.model.decode import prefill_chunk, prefill_packed
from trainer.model.kv_cache import PackedCache, empty_cache, empty_packed
from trainer.model.params_io import named_leaves, param_shapes
from trainer.model.transformer import Params


class DecoderEngine:
    """The one engine of this project; satisfies ``engine_api.Engine``."""

    def __init__(self, config: ModelConfig, settings: InferenceConfig) -> None:
        self._config = config
        self._settings = settings
        self._params: Params | None = None
        self.version = -1
        self.max_concurrent_decodes = settings.slots
        self.max_prefill_length = settings.max_len - 1
        self._placement = Placement(config, settings)
        kept = self._placement.kept
        self._prefill = jax.jit(kept(lambda params, row: prefill_packed(params, config, *row)))
        self._chunk = jax.jit(kept(prefill_chunk), static_argnums=1, donate_argnums=2)
        self._insert = jax.jit(kept(insert_prefixes), donate_argnums=0)
        # The last long rollouts of a batch must not cost steps of all slots.
        self._widths = _widths(settings.slots)
        steps = settings.steps_per_call
        self._generate = jax.jit(kept(partial(decode_steps, config, steps)), donate_argnums=1)

    def load_params(self, arrays: dict[str, np.ndarray]) -> Params:
        """Turn named arrays into parameters on the device; the layers' matrices in our dtype."""
        return self._placement.params(arrays)

    def update_params(self, params: Params, version: int) -> None:
        """Use these from the next call on; prefixes computed before are stale."""
        self._params = params
        self.version = version

    def warm_up(self) -> Iterator[None]:
        """Compile, on zeros, all there is to compile; later calls never do.

        Comes up for air after each program, so that the caller may stop. Before the first weights.
        """
        shapes = param_shapes(self._config)
        zeros = {name: np.zeros(leaf.shape, np.float32) for name, leaf in named_leaves(shapes)}
        params = self.load_params(zeros)
        state = self.init_decode_state()
        for width in self._widths:
            state, _ = self._generate(params, state, np.full(width, self._widths[-1], np.int32))
            yield
        width = SMALLEST_ROW // 2
        while width < self._settings.prefill_tokens or width < SMALLEST_ROW:
            width *= 2
            packed = self._prefill(params, np.zeros((4, width), np.int32))
            prefix = Prefix(packed, shared=0, own=0, last_token=0, length=1)
            state = self.insert(prefix, state, 0, SlotSampling(seed=0))
            yield
        if self.max_prefill_length - 1 > self._settings.prefill_tokens:
            chunk = np.zeros(self._settings.prefill_tokens, np.int32)
            packed = self._chunk(params, self._config, self._empty_row(), chunk, np.int32(0))
            state = self.insert(prefix._replace(packed=packed), state, 0, SlotSampling(seed=0))
            yield

    def init_decode_state(self) -> DecodeState:
        """All slots empty. An empty slot computes rubbish that nobody reads."""
        n = self.max_concurrent_decodes
        sampler = jax.tree.map(jnp.array, sampler_of((), n))
        cache = empty_cache(self._config, n, self._settings.max_len)
        state = DecodeState(cache, jnp.zeros(n, jnp.int32), jnp.zeros(n, jnp.int32), sampler)
        return self._placement.put(state)

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
        for pack in packs_of(prompts, self._settings.prefill_tokens):
            if len(pack[0]) - 1 > self._settings.prefill_tokens:
                prefixes.append(self._long_prefix(pack[0]))
                continue
            row, shared, owns = packed_row(pack)
            packed = self._prefill(self._params, row)
            prefixes += [
                Prefix(packed, shared, own, int(prompt[-1]), len(prompt))
                for prompt, own in zip(pack, owns, strict=True)
            ]
        return prefixes

    def _long_prefix(self, prompt: np.ndarray) -> Prefix:
        """Prefill in pieces of one size, so that no length compiles anything."""
        size = self._settings.prefill_tokens
        packed = self._empty_row()
        for start in range(0, len(prompt) - 1, size):
            chunk = np.zeros(size, np.int32)
            piece = prompt[start : min(start + size, len(prompt) - 1)]
            chunk[: len(piece)] = piece
            packed = self._chunk(self._params, self._config, packed, chunk, np.int32(start))
        return Prefix(packed, shared=0, own=0, last_token=int(prompt[-1]), length=len(prompt))

    def _empty_row(self) -> PackedCache:
        """Room for the longest prompt in whole pieces, twice (see ``prefill_packed``)."""
        size = self._settings.prefill_tokens
        room = 2 * size * -(-self.max_prefill_length // size)
        return self._placement.put(empty_packed(self._config, room))

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
            inserts = inserts_of(entries, self.max_concurrent_decodes)
            decode_state = self._insert(decode_state, packed, count, inserts)
        return decode_state

    def generate(
        self, decode_state: DecodeState, *, slots: Sequence[int] | None = None
    ) -> tuple[DecodeState, ResultTokens]:
        """Run the newest token of the given slots (all by default), draw ``steps_per_call``.

        The result has a column for every slot; those of slots not given mean nothing, and these
        slots do not move. Costs what the next larger compiled width costs.
        """
        rows = _rows(range(self._widths[-1]) if slots is None else slots, self._widths)
        state, data = self._generate(self._params, decode_state, rows)
        return state, ResultTokens(data, self.version)


def _widths(slots: int) -> list[int]:
    """Compiled numbers of rows. On CPU 16 rows cost little more than 4; each costs a program."""
    widths = [4, 16]
    while widths[-1] < slots:
        widths.append(2 * widths[-1])
    return [width for width in widths if width < slots] + [slots]


def _rows(slots: Sequence[int], widths: Sequence[int]) -> np.ndarray:
    """Slots as int32 of the next width. Out of range stands for none; all lie at their own index
    when all fit."""
    width = next(width for width in widths if width >= len(slots))
    rows = np.full(width, widths[-1], np.int32)
    rows[list(slots) if width == widths[-1] else slice(len(slots))] = slots
    return rows
