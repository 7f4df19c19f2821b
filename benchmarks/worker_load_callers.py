"""The callers of ``worker_load``, in a process of their own: no JAX, a thread each."""

from __future__ import annotations

import dataclasses
import http.client
import itertools
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import numpy as np

from infra.contracts.json_codec import from_json, to_json
from infra.contracts.records import GenerateReply, GenerateRequest, Message, SamplingParams
from infra.inference.segments import Segments

CLOSEST = 1e-4
"""Log-probs of tokens whose prompts were prefilled in other company differ by rounding."""
SOCKET_SECS = 20.0


class Digits:
    """Numbers below the vocabulary's size, written with spaces; no token ends a response."""

    eos_ids = ()
    digest = "digits"
    vocab_size = 20

    def encode_prompt(self, messages: tuple[Message, ...]) -> np.ndarray:
        return np.array([int(word) for word in messages[0].content.split()], np.int32)

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))

    def token_text(self, token: int) -> str:
        return str(token)


@dataclass(frozen=True, kw_only=True)
class Catalogue:
    """Requests, and the answer to each under every set of weights: ``answers[set][request]``."""

    requests: list[GenerateRequest]
    answers: list[list[GenerateReply]]


def catalogue_of(vocab: int, count: int = 64) -> list[GenerateRequest]:
    """Mixed lengths, samples and truncations."""
    drawn = random.Random(0)
    requests = []
    for i in range(count):
        prompt = [drawn.randrange(vocab) for _ in range(drawn.choice((1, 3, 8, 20)))]
        n = drawn.choice((1, 1, 2, 4))
        sampling = SamplingParams(
            n=n,
            max_new_tokens=drawn.choice((1, 2, 5, 10, 25)),
            temperature=drawn.choice((0.0, 0.7, 1.0)),
            top_k=drawn.choice((0, 0, 5)),
        )
        requests.append(
            GenerateRequest(
                request_id=f"catalogue-{i}",
                messages=(Message(role="text", content=" ".join(map(str, prompt))),),
                sampling=sampling,
                seeds=tuple(drawn.randrange(2**31) for _ in range(n)),
                min_version=0,
                timeout_secs=60.0,
            )
        )
    return requests


@dataclass
class Tally:
    """What all callers saw."""

    counts: Counter = field(default_factory=Counter)
    secs: list[float] = field(default_factory=list)
    example: str = ""
    loss: str = ""
    apart: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, name: str) -> None:
        with self.lock:
            self.counts[name] += 1

    def answered(self, secs: float, wrong: str, apart: float) -> None:
        with self.lock:
            self.counts["answered"] += 1
            self.counts["wrong"] += bool(wrong)
            self.example = self.example or wrong
            self.apart = max(self.apart, apart)
            self.secs.append(secs)

    def lose(self, why: str) -> None:
        with self.lock:
            self.counts["lost"] += 1
            self.loss = self.loss or why

    def told(self) -> dict[str, object]:
        names = ("answered", "left", "refused", "unavailable", "continued", "wrong", "lost")
        waited = sorted(self.secs) or [0.0]
        return {
            **{name: self.counts[name] for name in names},
            "median_secs": round(waited[len(waited) // 2], 3),
            "slowest_secs": round(waited[-1], 3),
            "logprobs_apart": self.apart,
            "example": self.example,
            "loss": self.loss,
        }


def call_for(pipe: Connection, port: int, catalogue: Catalogue, secs: float, callers: int) -> None:
    """The process: run all callers until the time is over; send what they saw."""
    tally, end, numbers = Tally(), time.monotonic() + secs, itertools.count()
    threads = [
        threading.Thread(target=Caller(i, port, catalogue, tally, numbers).run, args=(end,))
        for i in range(callers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pipe.send(tally.told())


class Caller:
    """Asks, waits as it is told to, checks; now and then it leaves without its answer."""

    def __init__(
        self, number: int, port: int, catalogue: Catalogue, tally: Tally, numbers: itertools.count
    ) -> None:
        self._catalogue, self._tally, self._numbers = catalogue, tally, numbers
        self._random = random.Random(number)
        self._http = http.client.HTTPConnection("127.0.0.1", port, timeout=SOCKET_SECS)

    def run(self, end: float) -> None:
        while time.monotonic() < end:
            index = self._random.randrange(len(self._catalogue.requests))
            name = f"load-{next(self._numbers)}"
            request = dataclasses.replace(self._catalogue.requests[index], request_id=name)
            started = time.monotonic()
            try:
                if self._random.random() < 0.1:
                    self._leave(request)
                    continue
                reply = self._whole(request)
            except (OSError, http.client.HTTPException, ValueError) as e:
                self._http.close()
                self._tally.lose(f"{type(e).__name__}: {e}")
                continue
            wrong, apart = self._compare(reply, index)
            self._tally.answered(time.monotonic() - started, wrong, apart)
        self._http.close()

    def _leave(self, request: GenerateRequest) -> None:
        self._http.request("POST", "/v1/generate", to_json(request))
        self._http.close()
        self._tally.add("left")

    def _whole(self, request: GenerateRequest) -> GenerateReply:
        if self._random.random() < 0.5:
            return self._ask(request)
        segments = Segments(request, self._random.choice((2, 6, 2**30)))
        while not segments.done:
            segments.add(self._ask(segments.next_request()))
        return segments.reply()

    def _ask(self, request: GenerateRequest) -> GenerateReply:
        self._tally.counts["continued"] += bool(request.so_far)
        while True:
            self._http.request("POST", "/v1/generate", to_json(request))
            response = self._http.getresponse()
            body = response.read()
            if response.status == 200:
                return from_json(GenerateReply, body)
            if response.status not in (429, 503):
                raise ValueError(f"status {response.status}: {body[:200]!r}")
            self._tally.add("refused" if response.status == 429 else "unavailable")
            # Half keep to Retry-After, half come back at once.
            if self._random.random() < 0.5:
                time.sleep(float(response.headers["Retry-After"]) * self._random.random())

    def _compare(self, reply: GenerateReply, index: int) -> tuple[str, float]:
        """What is wrong with a reply, and how far apart the log-probs are."""
        digests, apart = dict(reply.weights), 0.0
        for k, sample in enumerate(reply.samples):
            versions = set(sample.policy_versions.tolist())
            for version in versions:
                if digests.get(version) != f"set-{version % len(self._catalogue.answers)}":
                    return f"{reply.request_id}: version {version} has another digest", apart
            sets = {version % len(self._catalogue.answers) for version in versions}
            if len(sets) > 1:
                continue  # its weights changed between two segments, or in flight
            known = self._catalogue.answers[sets.pop()][index].samples[k]
            if not np.array_equal(known.response_ids, sample.response_ids):
                return f"{reply.request_id}: sample {k} has other tokens than when alone", apart
            for column in ("behaviour_logprobs", "raw_logprobs"):
                gap = np.abs(getattr(known, column) - getattr(sample, column)).max()
                apart = max(apart, float(gap))
        wrong = f"{reply.request_id}: log-probs {apart:g} apart" if apart > CLOSEST else ""
        return wrong, apart
