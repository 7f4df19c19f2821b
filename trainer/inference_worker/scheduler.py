"""Continuous batching: requests queue up, slots are filled as they become free.

    submit(request) -> queue -> [prefill once per group] -> slots -> one token per step -> reply
    offer_weights(version, params) -> taken at a boundary, or between two tokens

One thread owns the engine and calls ``step``; any thread may submit or offer. A request whose
``min_version`` is newer than the weights waits in the queue and the observer hears of it.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from infra.clock import Clock
from infra.contracts.errors import InferenceError
from infra.contracts.records import GenerateReply, GenerateRequest
from infra.text.tokenizer import Tokenizer
from trainer.inference_worker.config import InferenceConfig
from trainer.inference_worker.engine.engine_api import Engine, Params, ResultTokens
from trainer.inference_worker.generation_job import Job, QueueFull, Response, Watch, finish_reason
from trainer.inference_worker.observer import Observer
from trainer.inference_worker.totals import Totals

ENGINE_NAME = "headrace"


@dataclass(frozen=True, slots=True)
class Offer:
    """Weights that are loaded and wait to be taken."""

    version: int
    digest: str
    params: Params


class Scheduler:
    """Owns an engine. Everything public but ``step`` and ``run`` may be called from any thread."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        settings: InferenceConfig,
        clock: Clock,
        observer: Observer | None = None,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._settings = settings
        self._clock = clock
        self._observer = observer or Observer()
        self._drawn_version = -1
        self._changed = threading.Condition()
        self._jobs: dict[str, Job] = {}  # by request id, in order of arrival
        self._offer: Offer | None = None
        self._digests: dict[int, str] = {}
        self._stopping = False
        self._slots: list[Response | None] = [None] * engine.max_concurrent_decodes
        self._state = engine.init_decode_state()
        self.totals = Totals()

    # --- any thread -------------------------------------------------------------------------

    def submit(
        self,
        request: GenerateRequest,
        *,
        prompt_ids: np.ndarray | None = None,
        watch: Watch | None = None,
    ) -> Future[GenerateReply]:
        """Queue one group; a repeat of a running ``request_id`` joins it.

        ``prompt_ids`` stand in place of the messages; ``watch`` is told every token when it is
        drawn, by the engine's thread: be quick. The future raises ``InferenceError``.

        Raises:
            InferenceError: the prompt does not fit or cannot be encoded, or the worker is full
                (``QueueFull``) or stopping (retryable).
        """
        prompt_ids = self._prompt(request, prompt_ids)
        deadline = self._clock.now() + request.timeout_secs
        with self._changed:
            running = self._jobs.get(request.request_id)
            if running is not None:
                running.join(request, deadline)
                return running.future
            if self._stopping:
                raise InferenceError("the worker is stopping; ask another one")
            if len(self._jobs) >= self._settings.max_queue:
                raise QueueFull(f"the queue is full ({len(self._jobs)} groups); try later")
            job = Job(request, prompt_ids, deadline, Future(), deque(range(request.sampling.n)))
            job.watch = watch
            job.future.set_running_or_notify_cancel()  # from here on only we may end it
            self._jobs[request.request_id] = job
            behind = request.min_version > self._newest()
            self._changed.notify_all()
        if behind:
            self._observer.behind(request.min_version)
        return job.future

    def cancel(self, request_id: str, future: Future[GenerateReply]) -> None:
        """One who waits for ``future`` has gone; with the last one the request ends unanswered."""
        with self._changed:
            job = self._jobs.get(request_id)
            if job is not None and job.future is future:
                job.waiters -= 1
                if job.waiters == 0:
                    job.deadline = -math.inf
                    self._changed.notify_all()

    def offer_weights(self, version: int, digest: str, params: Params) -> None:
        """Hand over loaded weights; older ones than the newest known are ignored."""
        with self._changed:
            if version > self._newest():
                self._offer = Offer(version, digest, params)
                self._changed.notify_all()

    @property
    def version(self) -> int:
        """The version in use; -1 before the first."""
        return self._engine.version

    def load(self) -> tuple[int, int]:
        """(busy slots, groups that wait for a slot)."""
        with self._changed:
            waiting = sum(1 for job in self._jobs.values() if job.to_start)
        return sum(slot is not None for slot in self._slots), waiting

    def stop(self) -> None:
        """Make ``run`` return after the current token; what is unanswered fails, retryable."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    # --- the engine's thread ----------------------------------------------------------------

    def run(self) -> None:
        """Step until stopped, sleeping while there is nothing to do. Leaves no future open."""
        reason = "the worker is stopping; ask another one"
        try:
            while not self._stopping:
                started = self._clock.now()
                if self.step():
                    self.totals.busy_secs += self._clock.now() - started
                else:
                    self._sleep()
        except BaseException as e:
            reason = f"the engine failed: {type(e).__name__}: {e}"
            raise
        finally:
            with self._changed:
                self._stopping = True
                jobs = list(self._jobs.values())
                self._jobs.clear()
            for job in jobs:
                job.future.set_exception(InferenceError(reason))

    def _sleep(self) -> None:
        """Wait for a request, for weights, or for the next deadline."""
        with self._changed:
            if self._stopping or self._ready():
                return
            deadlines = [job.deadline for job in self._jobs.values()]
            wait = min(deadlines) - self._clock.now() if deadlines else None
            self._changed.wait(None if wait is None else max(wait, 0.001))

    def step(self) -> bool:
        """Do what can be done now: expire, swap, fill, draw one token. False if nothing could."""
        self._expire()
        self._swap()
        self._fill()
        taken = [i for i, slot in enumerate(self._slots) if slot is not None]
        if not taken:
            return False
        self._state, result = self._engine.generate(self._state, slots=taken)
        for one in result.convert_to_numpy().steps():
            self._collect(one)
        if result.version != self._drawn_version:
            self._drawn_version = result.version
            self._observer.first_token(result.version)
        return True

    def _ready(self) -> bool:
        """Whether a step would do anything (lock held)."""
        swaps = self._offer is not None
        return swaps or any(slot is not None for slot in self._slots) or bool(self._eligible())

    def _eligible(self) -> list[Job]:
        """Jobs that may be given slots now, oldest first (lock held)."""
        version = self._engine.version
        if version < 0:
            return []
        return [j for j in self._jobs.values() if j.to_start and j.request.min_version <= version]

    def _newest(self) -> int:
        return self._engine.version if self._offer is None else self._offer.version

    def _expire(self) -> None:
        now = self._clock.now()
        with self._changed:
            late = [job for job in self._jobs.values() if job.deadline <= now]
            for job in late:
                del self._jobs[job.request.request_id]
        for job in late:
            self._slots = [None if r is not None and r.job is job else r for r in self._slots]
            if job.waiters:
                self.totals.expired += 1
            else:
                self.totals.cancelled += 1
            job.future.set_exception(InferenceError(job.why_late(self._engine.version)))

    def _swap(self) -> None:
        """Take offered weights; at a boundary that means: when every slot is empty."""
        busy = any(slot is not None for slot in self._slots)
        with self._changed:
            if self._offer is None or (busy and self._settings.swap == "boundary"):
                return
            offer, self._offer = self._offer, None
            self._engine.update_params(offer.params, offer.version)
            self._digests[offer.version] = offer.digest
            for job in self._jobs.values():
                job.prefix = None
        self.totals.swaps += 1
        self._observer.swapped(offer.version)

    def _fill(self) -> None:
        """Give free slots to the oldest eligible groups; prefill what has no prefix yet."""
        free = [i for i, slot in enumerate(self._slots) if slot is None]
        with self._changed:
            # While weights wait for a boundary nothing new starts: the slots drain.
            jobs = [] if self._offer is not None else self._eligible()
        if not free or not jobs:
            return
        waiting = ((job, index) for job in jobs for index in job.to_start)
        starts = list(itertools.islice(waiting, len(free)))
        fresh = list(dict.fromkeys(job for job, _ in starts if job.prefix is None))
        prefixes = self._engine.prefill_batch([job.prompt_ids for job in fresh])
        for job, prefix in zip(fresh, prefixes, strict=True):
            job.prefix = prefix
            self.totals.prompt_tokens += len(job.prompt_ids)
        slots = free[: len(starts)]
        for slot, (job, index) in zip(slots, starts, strict=True):
            job.to_start.popleft()
            self._slots[slot] = Response(job, index)
        self._state = self._engine.bulk_insert(
            [job.prefix for job, _ in starts],
            self._state,
            slots,
            [job.slot_sampling(index) for job, index in starts],
        )

    def _collect(self, result: ResultTokens) -> None:
        """Hand every slot its token; finished responses leave, finished groups are answered."""
        tokens, behaviour, raw = result.data.tolist()
        decoder, max_len = self._tokenizer, self._settings.max_len
        self.totals.steps += 1
        for i, response in enumerate(self._slots):
            if response is None:
                continue
            self.totals.slot_steps += 1
            self.totals.tokens += 1
            response.take(int(tokens[i]), behaviour[i], raw[i], result.version)
            reason = finish_reason(response, decoder, max_len)
            if reason is not None:
                self._slots[i] = None
                job = response.job
                job.samples[response.index] = response.finish(reason, decoder.decode(response.ids))
                self.totals.rollouts += 1
                if job.done:
                    self._answer(job)

    def _answer(self, job: Job) -> None:
        with self._changed:
            del self._jobs[job.request.request_id]
        self.totals.requests += 1
        job.future.set_result(
            job.reply(self._digests, ENGINE_NAME, self._settings.dtype, self._tokenizer.digest)
        )

    def _prompt(self, request: GenerateRequest, ids: np.ndarray | None) -> np.ndarray:
        try:
            ids = self._tokenizer.encode_prompt(request.messages) if ids is None else ids
        except ValueError as e:
            raise InferenceError(f"the prompt cannot be encoded: {e}", retryable=False) from e
        limit = self._engine.max_prefill_length
        if not 1 <= len(ids) <= limit:
            raise InferenceError(
                f"the prompt has {len(ids)} tokens; 1 to {limit} fit (raise "
                "[inference] max_len or shorten the prompt)",
                retryable=False,
            )
        return ids
