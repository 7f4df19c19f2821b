"""What runs in which slot of the engine: filled, stepped, emptied. One thread's alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from infra.contracts.records import FinishReason
from trainer.inference_worker.engine.engine_api import Engine, Params, ResultTokens
from trainer.inference_worker.generation_job import Job, Response, TextDecoder, finish_reason
from trainer.inference_worker.totals import Totals

Ended = tuple[Response, FinishReason]

RECOMPUTED_AT_ONCE = 8
"""Slots whose new keys and values are held in memory beside the cache."""


class SlotTable:
    """The engine, its decode state, and the response that each slot works for."""

    def __init__(self, engine: Engine, decoder: TextDecoder, max_len: int, totals: Totals) -> None:
        self._engine, self._decoder, self._max_len, self._totals = engine, decoder, max_len, totals
        self._responses: list[Response | None] = [None] * engine.max_concurrent_decodes
        self._state = engine.init_decode_state()

    @property
    def running(self) -> dict[int, Response]:
        """By slot."""
        return {i: r for i, r in enumerate(self._responses) if r is not None}

    @property
    def busy(self) -> int:
        return sum(response is not None for response in self._responses)

    @property
    def free(self) -> list[int]:
        return [i for i, response in enumerate(self._responses) if response is None]

    def start(self, starts: Sequence[Response]) -> None:
        """Give each a free slot."""
        placed = dict(zip(self.free, starts, strict=False))
        self._insert(placed)
        for slot, response in placed.items():
            self._responses[slot] = response

    def release(self, jobs: Collection[Job]) -> list[Response]:
        """Free the slots that work for ``jobs``; return what ran there."""
        found = {slot: r for slot, r in self.running.items() if r.job in jobs}
        for slot in found:
            self._responses[slot] = None
        return list(found.values())

    def update(self, params: Params, version: int, *, recompute: bool) -> None:
        """Go on under other weights; ``recompute``: with no key or value of the old ones left."""
        self._engine.update_params(params, version)
        running = list(self.running.items()) if recompute else []
        for at in range(0, len(running), RECOMPUTED_AT_ONCE):
            self._insert(dict(running[at : at + RECOMPUTED_AT_ONCE]))
        self._totals.recomputed += len(running)

    def step(self) -> tuple[int, list[Ended]]:
        """Draw in all busy slots; return the version that drew, and what has ended.

        The slot of what has ended is free.
        """
        self._state, result = self._engine.generate(self._state, slots=list(self.running))
        results = result.convert_to_numpy().steps()
        return result.version, [ended for one in results for ended in self._collect(one)]

    def _collect(self, result: ResultTokens) -> list[Ended]:
        """Hand every slot its token."""
        tokens, behaviour, raw = result.data.tolist()
        self._totals.steps += 1
        ended = []
        for slot, response in self.running.items():
            self._totals.slot_steps += 1
            self._totals.tokens += 1
            response.take(int(tokens[slot]), behaviour[slot], raw[slot], result.version)
            reason = finish_reason(response, self._decoder, self._max_len)
            if reason is not None:
                self._responses[slot] = None
                ended.append((response, reason))
        return ended

    def _insert(self, placed: Mapping[int, Response]) -> None:
        """Prefill what has no prefix yet, once what a group shares; put all into their slots."""
        if not placed:
            return
        sources = [response.source for response in placed.values()]
        fresh = list(dict.fromkeys(source for source in sources if source.prefix is None))
        contexts = [source.context for source in fresh]
        for source, prefix in zip(fresh, self._engine.prefill_batch(contexts), strict=True):
            source.prefix = prefix
        self._totals.prompt_tokens += sum(map(len, contexts))
        self._state = self._engine.bulk_insert(
            [source.prefix for source in sources],
            self._state,
            list(placed),
            [response.sampling for response in placed.values()],
        )
        for response in placed.values():
            response.prefix = None
