"""What `bench engine` asks: groups with one prompt each, answers as long as real ones are.

Ends are planned, not drawn, so that every arm answers exactly the same: ``PlannedLengths`` puts an
end token where a sample's length is reached and takes away those that come by chance.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np

from infra.contracts.records import GenerateReply, GenerateRequest, Message, SamplingParams
from trainer.inference_worker.engine.decoder_engine import DecoderEngine
from trainer.inference_worker.engine.engine_api import TOKEN, DecodeState, Prefix, ResultTokens
from trainer.inference_worker.engine.engine_api import SlotSampling as Sampling
from trainer.inference_worker.scheduler import Scheduler

QUESTION_TOKENS = (24, 35, 39, 42, 45, 48, 52, 55, 58, 62, 65, 69, 74, 79, 87, 101, 188)
ANSWER_TOKENS = (29, 60, 69, 78, 86, 93, 102, 110, 117, 126, 137, 146, 157, 174, 189, 217, 415)
"""Sixteenths of the 1,319 test problems of GSM8K in SmolLM2's tokens (means 62 and 127)."""
WORDS = (
    "a",
    "day",
    "she",
    "has",
    "three",
    "more",
    "apples",
    "than",
    "he",
    "sold",
    "each",
    "of",
    "two",
)


def lengths_of(sixteenths: Sequence[int], count: int, seed: int, divisor: int = 1) -> list[int]:
    """Draw lengths from that distribution, divided so that a run fits into a coffee break."""
    uniforms = np.random.default_rng(seed).uniform(0, len(sixteenths) - 1, count)
    values = np.interp(uniforms, np.arange(len(sixteenths)), sixteenths)
    return [max(2, round(value / divisor)) for value in values]


def requests_of(groups: int, n: int, *, name: str, shared: bool = True) -> list[GenerateRequest]:
    """Groups of ``n``; not ``shared``: the same samples as requests of one each."""
    rng = np.random.default_rng(0)
    requests = []
    for group, length in enumerate(lengths_of(QUESTION_TOKENS, groups, seed=1)):
        text = " ".join(rng.choice(WORDS, length))
        seeds = tuple(range(group * n, (group + 1) * n))
        for part in (seeds,) if shared else [(seed,) for seed in seeds]:
            requests.append(
                GenerateRequest(
                    request_id=f"{name}-{part[0]}",
                    messages=(Message(role="text", content=text),),
                    sampling=SamplingParams(n=len(part), max_new_tokens=10_000),
                    seeds=part,
                    min_version=0,
                    timeout_secs=3600.0,
                )
            )
    return requests


class PlannedLengths:
    """An engine whose sample with seed i ends after ``lengths[i]`` tokens; times its inner calls.

    ``apart``: every prompt is prefilled alone. ``plain``: every step runs all slots.
    """

    def __init__(
        self,
        engine: DecoderEngine,
        lengths: Sequence[int],
        eos_ids: Sequence[int],
        *,
        apart: bool = False,
        plain: bool = False,
    ) -> None:
        self._engine, self._lengths, self._eos = engine, lengths, list(eos_ids)
        self._apart, self._plain = apart, plain
        self.max_concurrent_decodes = engine.max_concurrent_decodes
        self.max_prefill_length = engine.max_prefill_length
        self._left = np.zeros(self.max_concurrent_decodes, np.int64)
        self.secs = 0.0
        """Spent in the engine."""
        self.load_params, self.insert, self.prefill = (
            engine.load_params,
            engine.insert,
            engine.prefill,
        )
        self.update_params, self.init_decode_state = engine.update_params, engine.init_decode_state

    @property
    def version(self) -> int:
        return self._engine.version

    def prefill_batch(self, prompts: Sequence[np.ndarray]) -> list[Prefix]:
        started = time.perf_counter()
        parts = [[prompt] for prompt in prompts] if self._apart else [prompts]
        prefixes = [prefix for part in parts for prefix in self._engine.prefill_batch(part)]
        self.secs += time.perf_counter() - started
        return prefixes

    def bulk_insert(
        self,
        prefixes: Sequence[Prefix],
        decode_state: DecodeState,
        slots: Sequence[int],
        samplings: Sequence[Sampling],
    ) -> DecodeState:
        self._left[list(slots)] = [self._lengths[sampling.seed] for sampling in samplings]
        started = time.perf_counter()
        state = self._engine.bulk_insert(prefixes, decode_state, slots, samplings)
        self.secs += time.perf_counter() - started
        return state

    def generate(
        self, decode_state: DecodeState, *, slots: Sequence[int] | None = None
    ) -> tuple[DecodeState, ResultTokens]:
        started = time.perf_counter()
        state, result = self._engine.generate(decode_state, slots=None if self._plain else slots)
        result = result.convert_to_numpy()
        self.secs += time.perf_counter() - started
        tokens = result.data[TOKEN]
        tokens[np.isin(tokens, self._eos)] = max(self._eos) + 1
        self._left -= 1
        tokens[self._left == 0] = self._eos[0]
        return state, result


def answer(scheduler: Scheduler, requests: Sequence[GenerateRequest]) -> list[GenerateReply]:
    """Step until all are answered."""
    futures: list[Future[GenerateReply]] = [scheduler.submit(request) for request in requests]
    while not all(future.done() for future in futures):
        scheduler.step()
    return [future.result() for future in futures]
