"""The queue in front of the engine: what any thread may ask of the one that decodes."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Literal

import numpy as np

from infra.clock import Clock
from infra.contracts.errors import InferenceError
from infra.contracts.records import GenerateReply, GenerateRequest
from infra.text.tokenizer import Tokenizer
from trainer.inference_worker.generation_job import Job, QueueFull, Watch
from trainer.inference_worker.sampling_rules import rules_for

STOPPING = "the worker is stopping; ask another one"

Pause = Literal["finish", "in_place", "abort"]
"""What a pause does to what runs: lets it finish, holds it with its keys and values until
``resume``, or ends it. Nothing starts meanwhile, and weights are taken as ever."""


class JobQueue:
    """Groups in order of arrival, until they are answered. Safe from several threads."""

    def __init__(
        self, tokenizer: Tokenizer, clock: Clock, *, max_queue: int, max_prompt: int
    ) -> None:
        self._tokenizer, self._clock = tokenizer, clock
        self._max_queue, self._max_prompt = max_queue, max_prompt
        self._changed = threading.Condition()
        self._jobs: dict[str, Job] = {}  # by request id, in order of arrival
        self._stopping = False
        self.paused: Pause | None = None

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
        rules = rules_for(request.sampling, prompt_ids, self._tokenizer)
        deadline = self._clock.now() + request.timeout_secs
        with self._changed:
            running = self._jobs.get(request.request_id)
            if running is not None:
                running.join(request, deadline)
                return running.future
            if self._stopping:
                raise InferenceError(STOPPING)
            if self.paused:
                raise InferenceError(f"the worker is paused ({self.paused}); ask another one")
            if len(self._jobs) >= self._max_queue:
                raise QueueFull(f"the queue is full ({len(self._jobs)} groups); try later")
            to_start = deque(range(request.sampling.n))
            job = Job(request, prompt_ids, rules, deadline, Future(), to_start)
            job.watch = watch
            job.future.set_running_or_notify_cancel()  # from here on only we may end it
            self._jobs[request.request_id] = job
            self._changed.notify_all()
        self._queued(job)
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

    def pause(self, how: Pause) -> None:
        """Take nothing new until ``resume``; see ``Pause``. Deadlines go on."""
        with self._changed:
            self.paused = how
            if how == "abort":
                self._end("aborted: the worker was paused; ask another one")
            self._changed.notify_all()

    def resume(self) -> None:
        """Go on where ``pause`` held."""
        with self._changed:
            self.paused = None
            self._changed.notify_all()

    def abort(self, request_id: str | None = None) -> int:
        """End one request, with all its segments to come, or all; return how many groups.

        Who takes segments is answered as far as it came, others get a retryable error.
        """
        with self._changed:
            return self._end(
                "aborted at this worker; ask another one",
                lambda job: request_id is None or job.belongs_to(request_id),
            )

    def cut_segments(self) -> int:
        """Answer all who take segments as far as they came: they can go on elsewhere."""
        with self._changed:
            return self._end(STOPPING, lambda job: job.request.segment_tokens > 0)

    def _queued(self, job: Job) -> None:
        """A new group has come (lock not held)."""

    def _end(self, why: str, which: Callable[[Job], bool] = lambda job: True) -> int:
        """Have jobs ended at the next step (lock held)."""
        chosen = [job for job in self._jobs.values() if which(job)]
        for job in chosen:
            job.stop_reason = why
        self._changed.notify_all()
        return len(chosen)

    def _prompt(self, request: GenerateRequest, ids: np.ndarray | None) -> np.ndarray:
        try:
            ids = self._tokenizer.encode_prompt(request.messages) if ids is None else ids
        except ValueError as e:
            raise InferenceError(f"the prompt cannot be encoded: {e}", retryable=False) from e
        limit = self._max_prompt
        if not 1 <= len(ids) <= limit:
            raise InferenceError(
                f"the prompt has {len(ids)} tokens; 1 to {limit} fit (raise "
                "[inference] max_len or shorten the prompt)",
                retryable=False,
            )
        longest = max(map(len, request.so_far), default=0)
        most = min(limit - len(ids), request.sampling.max_new_tokens - 1)
        if longest > most:
            raise InferenceError(
                f"so_far has {longest} tokens after a prompt of {len(ids)}; with at most {most} "
                "there is something left to draw",
                retryable=False,
            )
        return ids
