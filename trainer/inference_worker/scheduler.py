"""Continuous batching: requests queue up, slots are filled as they become free.

    submit(request) -> queue -> [prefill once per group] -> slots -> one token per step -> reply
    offer_weights(version, params) -> taken at a boundary, or between two tokens
    pause, resume, abort -> at the next step

One thread owns the engine and calls ``step``; any thread may call the rest. A request whose
``min_version`` is newer than the weights waits in the queue and the observer hears of it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from infra.clock import Clock
from infra.contracts.errors import InferenceError
from infra.contracts.records import FinishReason
from infra.text.tokenizer import Tokenizer
from trainer.inference_worker.config import InferenceConfig
from trainer.inference_worker.engine.engine_api import Engine, Params
from trainer.inference_worker.generation_job import Job
from trainer.inference_worker.job_queue import STOPPING, JobQueue
from trainer.inference_worker.observer import Observer
from trainer.inference_worker.slot_table import SlotTable
from trainer.inference_worker.totals import Totals

ENGINE_NAME = "headrace"


@dataclass(frozen=True, slots=True)
class Offer:
    """Weights that are loaded and wait to be taken."""

    version: int
    digest: str
    params: Params


class Scheduler(JobQueue):
    """Owns an engine. Everything public but ``step`` and ``run`` may be called from any thread."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        settings: InferenceConfig,
        clock: Clock,
        observer: Observer | None = None,
    ) -> None:
        super().__init__(
            tokenizer, clock, max_queue=settings.max_queue, max_prompt=engine.max_prefill_length
        )
        self._engine = engine
        self._settings = settings
        self._observer = observer or Observer()
        self._drawn_version = self._newest = -1
        self._offer: Offer | None = None
        self._digests: dict[int, str] = {}  # of the version in use, and those replies will name
        self.totals = Totals()
        self._slots = SlotTable(engine, tokenizer, settings.max_len, self.totals)

    # --- any thread -------------------------------------------------------------------------

    def offer_weights(self, version: int, digest: str, params: Params) -> None:
        """Hand over loaded weights; older ones than the newest known are ignored."""
        with self._changed:
            if version > self._newest:
                self._newest = version
                self._offer = Offer(version, digest, params)
                self._changed.notify_all()

    @property
    def version(self) -> int:
        """The version in use; -1 before the first."""
        return self._engine.version

    @property
    def digest(self) -> str:
        """The manifest digest of what is in use."""
        return self._digests.get(self._engine.version, "")

    @property
    def slots(self) -> int:
        return self._engine.max_concurrent_decodes

    def load(self) -> tuple[int, int]:
        """(busy slots, groups that wait for a slot)."""
        with self._changed:
            waiting = sum(1 for job in self._jobs.values() if job.to_start)
        return self._slots.busy, waiting

    def stop(self) -> None:
        """Make ``run`` return after the current token; what is unanswered fails, retryable."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    # --- the engine's thread ----------------------------------------------------------------

    def run(self) -> None:
        """Step until stopped, sleeping while there is nothing to do. Leaves no future open."""
        reason = STOPPING
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
        """Do what can be done now: end, swap, fill, draw one token. False if nothing was drawn."""
        self._end_jobs()
        self._swap()
        if self.paused is None:
            self._fill()
        if self.paused == "in_place" or not self._slots.busy:
            return False
        version, ended = self._slots.step()
        for response, reason in ended:
            job = response.job
            job.samples[response.index] = response.finish(reason, self._tokenizer)
            if job.done:
                with self._changed:
                    del self._jobs[job.request.request_id]
                self._answer(job)
        if version != self._drawn_version:
            self._drawn_version = version
            self._observer.first_token(version)
        return True

    def _ready(self) -> bool:
        """Whether a step would do anything (lock held)."""
        if self._swaps_now() or any(job.stop_reason for job in self._jobs.values()):
            return True
        if self.paused:
            return self.paused != "in_place" and self._slots.busy > 0
        return self._slots.busy > 0 or bool(self._eligible())

    def _eligible(self) -> list[Job]:
        """Jobs that may be given slots now, oldest first (lock held)."""
        version = self._engine.version
        if version < 0:
            return []
        return [j for j in self._jobs.values() if j.to_start and j.request.min_version <= version]

    def _queued(self, job: Job) -> None:
        if job.request.min_version > self._newest:
            self._observer.behind(job.request.min_version)

    def _end_jobs(self) -> None:
        """Let go what is late, aborted, or waited for by nobody."""
        now = self._clock.now()
        with self._changed:
            ended = [j for j in self._jobs.values() if j.stop_reason or j.deadline <= now]
            for job in ended:
                del self._jobs[job.request.request_id]
        unfinished = self._slots.release(ended) if ended else []
        for job in ended:
            if job.waiters and job.cut([r for r in unfinished if r.job is job], self._tokenizer):
                self._answer(job)
                continue
            name = "cancelled" if not job.waiters else "aborted" if job.stop_reason else "expired"
            setattr(self.totals, name, getattr(self.totals, name) + 1)
            job.future.set_exception(InferenceError(job.why_late(self._engine.version)))

    def _swaps_now(self) -> bool:
        """At a boundary that means: when every slot is empty."""
        at_boundary = self._settings.swap == "boundary"
        return self._offer is not None and not (at_boundary and self._slots.busy)

    def _swap(self) -> None:
        """Take offered weights, if it is time to."""
        with self._changed:
            if not self._swaps_now():
                return
            offer, self._offer = self._offer, None
            self._forget_digests()
            self._digests[offer.version] = offer.digest
            for job in self._jobs.values():
                job.prefix = None
        recompute = self._settings.kv_after_swap == "recompute"
        self._slots.update(offer.params, offer.version, recompute=recompute)
        self.totals.swaps += 1
        self._observer.swapped(offer.version)

    def _forget_digests(self) -> None:
        """Keep those of versions that a reply to come must name (lock held)."""
        used = {version for r in self._slots.running.values() for version in set(r.versions)}
        for job in self._jobs.values():
            for sample in job.samples.values():
                used.update(sample.policy_versions.tolist())
        self._digests = {v: digest for v, digest in self._digests.items() if v in used}

    def _fill(self) -> None:
        """Give free slots to the oldest eligible groups."""
        free = len(self._slots.free)
        with self._changed:
            # While weights wait for a boundary nothing new starts: the slots drain.
            jobs = [] if self._offer is not None else self._eligible()
        if not free or not jobs:
            return
        waiting = ((job, index) for job in jobs for index in job.to_start)
        starts = list(itertools.islice(waiting, free))
        for job, _ in starts:
            job.to_start.popleft()
        self._slots.start([job.response(index) for job, index in starts])

    def _answer(self, job: Job) -> None:
        segments = sum(s.finish_reason is FinishReason.SEGMENT for s in job.samples.values())
        self.totals.segments += segments
        self.totals.rollouts += len(job.samples) - segments
        self.totals.requests += 1
        try:
            reply = job.reply(
                self._digests, ENGINE_NAME, self._settings.dtype, self._tokenizer.digest
            )
        except InferenceError as e:
            job.future.set_exception(e)
        else:
            job.future.set_result(reply)
