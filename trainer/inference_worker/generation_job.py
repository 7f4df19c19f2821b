"""One request while it is being answered, and when a response is finished; plain Python."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import numpy as np

from infra.contracts.errors import InferenceError
from infra.contracts.records import FinishReason, GenerateReply, GenerateRequest, Sample
from infra.inference.segments import SEGMENT_MARK
from trainer.inference_worker.engine.engine_api import Prefix, SlotSampling
from trainer.inference_worker.engine.thinking import Thinker
from trainer.inference_worker.sampling_rules import SamplingRules


class QueueFull(InferenceError):
    """As many groups wait as may; retryable, here or elsewhere."""


class Drawn(NamedTuple):
    """One token of sample ``index``."""

    index: int
    token: int
    behaviour: float
    raw: float
    version: int
    sampled: bool = True
    """False: forced, and both log-probs are 0."""


Watch = Callable[[Drawn], None]


class TextDecoder(Protocol):
    """What finishing a response needs of a tokenizer."""

    eos_ids: tuple[int, ...]

    def decode(self, ids: list[int]) -> str:
        """Ids into text."""


@dataclass(slots=True, eq=False)
class Response:
    """One sample on its way; lists grow by one per token."""

    job: Job
    index: int
    before: tuple[int, ...] = ()
    """Tokens of earlier segments."""
    ids: list[int] = field(default_factory=list)
    behaviour: list[float] = field(default_factory=list)
    raw: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    prefix: Prefix | None = None
    """Of all its tokens, between prefill and insertion."""
    sampled: list[bool] = field(default_factory=list)
    """False where a token was forced."""
    thinker: Thinker | None = None

    def __post_init__(self) -> None:
        self.thinker = self.job.rules.thinker(self.before)

    @property
    def context(self) -> np.ndarray:
        """All tokens up to now, the prompt's included."""
        return np.array([*self.job.prompt_ids, *self.before, *self.ids], np.int32)

    @property
    def source(self) -> Response | Job:
        """Whose ``context`` is prefilled for it: the group's while it has no token of its own."""
        return self if self.before or self.ids else self.job

    @property
    def sampling(self) -> SlotSampling:
        """How the engine draws its next tokens."""
        return self.job.rules.slot(self.job.request.seeds[self.index], self.thinker)

    def tail(self, tokens: int) -> list[int]:
        """The last so many response tokens."""
        missing = tokens - len(self.ids)
        return [*self.before[-missing:], *self.ids] if missing > 0 else self.ids[-tokens:]

    def take(self, token: int, behaviour: float, raw: float, version: int) -> None:
        """Add one token; one without finite log-probs is no token, and the group fails."""
        if not (math.isfinite(behaviour) and math.isfinite(raw)):
            self.job.diverged = version
            return
        sampled = self.thinker is None or not self.thinker.take(token)
        self.sampled.append(sampled)
        if not sampled:
            behaviour = raw = 0.0
        self.ids.append(token)
        self.behaviour.append(behaviour)
        self.raw.append(raw)
        self.versions.append(version)
        if self.job.watch is not None:
            self.job.watch(Drawn(self.index, token, behaviour, raw, version, sampled))

    def finish(self, reason: FinishReason, decoder: TextDecoder) -> Sample:
        """Freeze into the record."""
        return Sample(
            response_ids=np.array(self.ids, np.int32),
            response_text=decoder.decode([*self.before, *self.ids]),
            behaviour_logprobs=np.array(self.behaviour, np.float32),
            raw_logprobs=np.array(self.raw, np.float32),
            policy_versions=np.array(self.versions, np.int32),
            finish_reason=reason,
            loss_mask=None if all(self.sampled) else np.array(self.sampled, bool),
        )


@dataclass(slots=True, eq=False)
class Job:
    """One group. Its samples may run at different times, as slots become free."""

    request: GenerateRequest
    prompt_ids: np.ndarray
    rules: SamplingRules
    deadline: float
    future: Future[GenerateReply]
    to_start: deque[int]
    """Sample indices that have no slot yet."""
    samples: dict[int, Sample] = field(default_factory=dict)
    prefix: Prefix | None = None
    """Computed at the first insertion; stale after a weight swap."""
    watch: Watch | None = None
    waiters: int = 1
    """Callers that wait for ``future``; without any the job ends."""
    stop_reason: str = ""
    """Why it is to end now, finished or not."""

    @property
    def context(self) -> np.ndarray:
        """What all samples begin with."""
        return self.prompt_ids

    def response(self, index: int) -> Response:
        """Sample ``index`` before its first token here."""
        so_far = self.request.so_far
        return Response(self, index, so_far[index] if so_far else ())

    diverged: int | None = None
    """The version under which a log-prob was no number."""

    @property
    def done(self) -> bool:
        return len(self.samples) == self.request.sampling.n

    def join(self, request: GenerateRequest, deadline: float) -> None:
        """Let a repeat of the same request wait for the same future.

        Raises:
            InferenceError: it asks for something else.
        """
        if replace(request, timeout_secs=self.request.timeout_secs) != self.request:
            raise InferenceError(
                f"request_id {request.request_id} is running with other contents; "
                "give every request its own id",
                retryable=False,
            )
        self.deadline = max(self.deadline, deadline)
        self.waiters += 1

    def belongs_to(self, request_id: str) -> bool:
        """Whether it is that request, or a later segment of it."""
        own = self.request.request_id
        return own == request_id or own.startswith(request_id + SEGMENT_MARK)

    def cut(self, running: Sequence[Response], decoder: TextDecoder) -> bool:
        """End its samples as far as they came, if the caller takes that and there is a token."""
        news = bool(self.samples) or any(response.ids for response in running)
        if not (self.request.segment_tokens and news):
            return False
        here = {response.index: response for response in running}
        for index in range(self.request.sampling.n):
            if index not in self.samples:
                response = here.get(index) or self.response(index)
                self.samples[index] = response.finish(FinishReason.SEGMENT, decoder)
        return True

    def why_late(self, version: int) -> str:
        """What to say when it ends unfinished under ``version``."""
        if self.stop_reason:
            return self.stop_reason
        given, need = self.request.timeout_secs, self.request.min_version
        if need > version:
            return (
                f"no answer within {given:g} s: the request needs version {need}, the worker has "
                f"{version}; is the trainer publishing?"
            )
        return (
            f"no answer within {given:g} s: {len(self.samples)} of {self.request.sampling.n} "
            "samples were finished; allow more time or add workers"
        )

    def reply(
        self, digests: dict[int, str], engine: str, dtype: str, tokenizer_digest: str
    ) -> GenerateReply:
        """The answer, samples in seed order.

        Raises:
            InferenceError: the model gave log-probs that are no numbers.
        """
        if self.diverged is not None:
            raise InferenceError(
                f"the model diverged: version {self.diverged} gives log-probs that are not "
                "finite; look at the trainer's metrics and go back to an earlier version"
            )
        ordered = tuple(self.samples[i] for i in range(self.request.sampling.n))
        versions = sorted({int(v) for s in ordered for v in s.policy_versions})
        return GenerateReply(
            request_id=self.request.request_id,
            prompt_ids=self.prompt_ids,
            samples=ordered,
            weights=tuple((v, digests[v]) for v in versions),
            engine=engine,
            dtype=dtype,
            tokenizer_digest=tokenizer_digest,
        )


def finish_reason(response: Response, decoder: TextDecoder, max_len: int) -> FinishReason | None:
    """Decide whether the newest token ends the response; None to go on.

    An end token or a completed stop string comes before the length: a response that ends exactly at
    its limit is whole, not truncated.
    """
    sampling, job = response.job.request.sampling, response.job
    if job.diverged is not None:
        return FinishReason.ERROR
    length = len(response.before) + len(response.ids)
    if length >= sampling.min_new_tokens and _stops(response, decoder):
        return FinishReason.STOP
    if length >= min(sampling.max_new_tokens, max_len - len(job.prompt_ids)):
        return FinishReason.LENGTH
    limit = job.request.segment_tokens
    return FinishReason.SEGMENT if limit and len(response.ids) >= limit else None


def _stops(response: Response, decoder: TextDecoder) -> bool:
    """Whether the newest token is an end, or completes a stop string."""
    job = response.job
    if response.ids[-1] in job.rules.ends:
        return True
    stops = job.request.sampling.stop
    if not stops:
        return False
    # Every token is at least one byte, so a stop string that the newest token completes begins
    # within as many tokens as it has bytes.
    tail = decoder.decode(response.tail(max(len(stop.encode()) for stop in stops)))
    return any(stop in tail for stop in stops)
