"""What `bench engine` asks: groups with one prompt each, answers as long as real ones are.

Ends are planned, not drawn, so that every arm answers exactly the same: ``PlannedLengths`` puts an
end token where a sample's length is reached and takes away those that come by chance.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from infra.contracts.records import GenerateReply, GenerateRequest, Message, SamplingParams
from infra.inference.http_client import HttpInferenceClient
from infra.text.tokenizer import Tokenizer
from trainer.inference_worker.engine.decoder_engine import DecoderEngine
from trainer.inference_worker.engine.engine_api import TOKEN, DecodeState, Prefix, ResultTokens
from trainer.inference_worker.engine.engine_api import SlotSampling as Sampling
from trainer.inference_worker.http.http_backend import Backend
from trainer.inference_worker.scheduler import Scheduler
from trainer.inference_worker.server import WorkerServer

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
            requests.append(request_of(text, part, name))
    return requests


def request_of(text: str, seeds: Sequence[int], name: str) -> GenerateRequest:
    """One group, whose samples end where the engine says."""
    return GenerateRequest(
        request_id=f"{name}-{seeds[0]}",
        messages=(Message(role="text", content=text),),
        sampling=SamplingParams(n=len(seeds), max_new_tokens=10_000),
        seeds=tuple(seeds),
        min_version=0,
        timeout_secs=3600.0,
    )


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


def served_secs(
    scheduler: Scheduler, tokenizer: Tokenizer, requests: Sequence[GenerateRequest]
) -> float:
    """Seconds until a client on this machine has all answers through HTTP."""
    backend = Backend(scheduler=scheduler, tokenizer=tokenizer, model="bench")
    server = WorkerServer("127.0.0.1", 0, backend)
    threads = [threading.Thread(target=run) for run in (server.serve_forever, scheduler.run)]
    client = HttpInferenceClient("http://{}:{}".format(*server.server_address[:2]))
    for thread in threads:
        thread.start()
    started = time.perf_counter()
    try:
        for future in [client.submit(request) for request in requests]:
            future.result()
        return time.perf_counter() - started
    finally:
        client.close()
        scheduler.stop()
        server.shutdown()
        server.server_close()
        for thread in threads:
            thread.join()


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupWork:
    """Groups of one prompt each, and how long every sample becomes."""

    texts: list[str]
    prompts: list[list[int]]
    """The texts' ids."""
    lengths: list[list[int]]
    """Tokens of each sample, by group."""

    @property
    def flat_lengths(self) -> list[int]:
        return [length for own in self.lengths for length in own]

    @property
    def tokens(self) -> int:
        return sum(self.flat_lengths)

    def requests(self, name: str) -> list[GenerateRequest]:
        """One per group; sample i of all has seed i, as ``PlannedLengths`` wants it."""
        n = len(self.lengths[0])
        return [
            request_of(text, range(group * n, (group + 1) * n), name)
            for group, text in enumerate(self.texts)
        ]


def group_work(tokenizer: Tokenizer, groups: int, n: int, *, divisor: int, room: int) -> GroupWork:
    """Groups of ``n`` over problems of GSM8K, every sample as long as some real answer.

    Answers are divided by ``divisor``; problems that could outgrow ``room`` are left out. Without
    the data (``HEADRACE_SHARED_DATA``) prompts are words, of the lengths that problems have.
    """
    rng = np.random.default_rng(7)
    problems = gsm8k()
    if problems:
        texts = [f"Question: {question}\nAnswer:" for question, _ in problems]
        answers = [len(tokenizer.encode(answer)) for _, answer in problems]
    else:
        counts = lengths_of(QUESTION_TOKENS, 4 * groups, seed=1)
        texts = [" ".join(rng.choice(WORDS, count)) for count in counts]
        answers = lengths_of(ANSWER_TOKENS, 1000, seed=2)
    prompts = [tokenizer.encode(text, begin=True).tolist() for text in texts]
    longest = max(answers) // divisor + 1
    fitting = [i for i, prompt in enumerate(prompts) if len(prompt) + longest < room]
    chosen = rng.choice(fitting, groups, replace=False)
    drawn = rng.choice(answers, (groups, n)) / divisor
    return GroupWork(
        texts=[texts[i] for i in chosen],
        prompts=[prompts[i] for i in chosen],
        lengths=np.maximum(2, np.round(drawn)).astype(int).tolist(),
    )


def gsm8k() -> list[tuple[str, str]]:
    """(question, answer without calculator marks) of the test problems; none without the file."""
    beside = Path(__file__).parents[2] / "shared" / "data"
    folder = Path(os.environ.get("HEADRACE_SHARED_DATA") or beside)
    path = folder / "datasets" / "gsm8k_test.jsonl"
    if not path.is_file():
        return []
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [(row["question"], re.sub("<<.*?>>", "", row["answer"])) for row in rows]


def secs_of(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
