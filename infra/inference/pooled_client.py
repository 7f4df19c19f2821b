"""One client for one or several workers: whom to ask, whom to ask next, until the deadline.

A thread pool of blocking attempts. A request that gets no answer goes to the next worker at once,
and when all were asked, waits with backoff and jitter and begins again. Deadlines are end to end:
each attempt is told what is left, and, where somebody else could still be asked, a quarter less, so
that a worker that hangs does not take the whole. A repeat carries the same request id.

* no connection, 429 and 503: until the deadline (``Retry-After`` is honoured per worker);
* unusable answers: ``retries`` per worker and request after the first;
* refused (4xx): an error when a second worker agrees, or nobody else is well.
"""

from __future__ import annotations

import dataclasses
import random
import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import NoReturn

from infra.clock import Clock, SystemClock
from infra.contracts.errors import InferenceError
from infra.contracts.records import GenerateReply, GenerateRequest
from infra.inference.capabilities import weakest
from infra.inference.hedging import HedgeBudget, HedgeConfig
from infra.inference.reply_checks import check_reply
from infra.inference.segments import Segments
from infra.inference.worker import AttemptError, Busy, Call, Failed, Unreachable, Worker
from infra.inference.worker_roster import Standing, WorkerRoster

FIRST_WAIT_SECS, LONGEST_WAIT_SECS = 0.05, 2.0
SHARE = 0.75
PROBE_SECS = 1.0

Wait = Callable[[Collection[Future], float | None], Collection[Future]]
"""Futures and seconds (None: for ever) -> those that are done."""


def _wait(futures: Collection[Future], secs: float | None) -> Collection[Future]:
    return wait(futures, secs, return_when=FIRST_COMPLETED).done


class PooledClient:
    """Client of several workers; safe from several threads.

    Args:
        workers: At least one; closed with the client.
        threads: Requests under way at a time; further ones queue.
        retries: Attempts after the first, per worker, for unusable answers.
        clock: For deadlines and backoff.
        jitter: Randomness of the backoff and of choices between equals.
        hedge: Send slow requests twice; None: never.
        segment_tokens: Ask for responses in segments of so many tokens, where all workers can: what
            a worker that stops, or is too slow, has of one is continued by the next. 0: whole.
        wait: How to wait for one of several attempts.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        *,
        threads: int = 32,
        retries: int = 4,
        clock: Clock | None = None,
        jitter: random.Random | None = None,
        hedge: HedgeConfig | None = None,
        segment_tokens: int = 0,
        wait: Wait = _wait,
    ) -> None:
        self.capabilities = weakest(worker.capabilities for worker in workers)
        self._segment_tokens = segment_tokens if self.capabilities.segments else 0
        self._retries = retries
        self._clock = clock or SystemClock()
        self._jitter = jitter or random.Random()
        self._roster = WorkerRoster(workers, self._jitter)
        self._hedge = HedgeBudget(hedge) if hedge and len(workers) > 1 else None
        self._wait = wait
        self._closing = threading.Event()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="inference")
        self._racers = self._hedge and ThreadPoolExecutor(2 * threads, thread_name_prefix="attempt")

    def submit(self, request: GenerateRequest) -> Future[GenerateReply]:
        """Start one request; its deadline, retries included, starts now."""
        if self._closing.is_set():
            raise InferenceError("the client is closed", retryable=False)
        return self._pool.submit(self._generate, request, self._clock.now() + request.timeout_secs)

    def counters(self) -> dict[str, float]:
        """Per worker: samples in flight, attempts, failures, busy answers, ejections, hedges."""
        return self._roster.counters()

    def close(self) -> None:
        """Stop accepting work; requests under way end with an error."""
        self._closing.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
        for standing in self._roster.standings:
            standing.worker.close()

    def _generate(self, request: GenerateRequest, deadline: float) -> GenerateReply:
        """One answer, or one segment after the other, each from whoever has room."""
        if not self._segment_tokens or request.segment_tokens:
            return self._answer(request, deadline)
        segments = Segments(request, self._segment_tokens)
        while not segments.done:
            segments.add(self._answer(segments.next_request(), deadline))
        return segments.reply()

    def _answer(self, request: GenerateRequest, deadline: float) -> GenerateReply:
        """Attempt after attempt; see the module's docstring for the order."""
        tries = _Tries(request=request, deadline=deadline, retries=self._retries)
        pause, started = FIRST_WAIT_SECS, self._clock.now()
        while True:
            if self._closing.is_set():
                raise InferenceError(f"{tries.name}: the client was closed") from tries.error
            now = self._clock.now()
            if deadline <= now:
                tries.give_up(now)
            self._probe_one(now)
            standing = self._roster.take(
                request, self._clock.now(), asked=tries.asked, given_up=tries.given_up
            )
            if standing is not None:
                try:
                    reply = self._ask(standing, tries)
                except (AttemptError, InferenceError) as e:
                    tries.error = e
                else:
                    if self._hedge:
                        self._hedge.answered(self._clock.now() - started)
                    return reply
                if len(tries.refusals) > 1 or len(tries.given_up) == len(self._roster.standings):
                    tries.give_up(self._clock.now())
                continue
            now = self._clock.now()
            secs = max(
                pause * self._jitter.uniform(0.5, 1.0),
                self._roster.next_free_at(tries.given_up) - now,
            )
            refused = tries.refusals and not self._roster.any_well(tries.given_up)
            if refused or deadline - now <= max(secs, pause):
                tries.give_up(now)
            self._clock.wait(secs)
            tries.asked.clear()
            pause = min(2 * pause, LONGEST_WAIT_SECS)

    def _ask(self, standing: Standing, tries: _Tries) -> GenerateReply:
        """One attempt, or a race of two."""
        delay = self._hedge.delay() if self._hedge else None
        if delay is None or tries.asked:
            return self._attempt(standing, tries, Call())
        calls = {self._race(standing, tries, call := Call()): call}
        if not self._wait(calls, delay) and self._hedge.spend():
            second = self._roster.take(
                tries.request, self._clock.now(), asked={*tries.asked, standing}
            )
            if second is not None:
                self._roster.count_hedge(second)
                calls[self._race(second, tries, call := Call())] = call
        while True:
            done = self._wait(calls, None)
            winner = next((f for f in done if f.exception() is None), None)
            if winner is not None or len(done) == len(calls):
                break
            for future in done:
                del calls[future]
        for future, call in calls.items():
            if future is not winner:
                call.cancel()
        return (winner or next(iter(done))).result()

    def _race(self, standing: Standing, tries: _Tries, call: Call) -> Future[GenerateReply]:
        return self._racers.submit(self._attempt, standing, tries, call)

    def _attempt(self, standing: Standing, tries: _Tries, call: Call) -> GenerateReply:
        request, outcome = tries.request, {}
        tries.add(standing)
        try:
            left = tries.deadline - self._clock.now()
            if len(tries.asked | tries.given_up) < len(self._roster.standings):
                left *= SHARE
            if left <= 0:
                raise Unreachable("the deadline passed before it was sent")
            reply = standing.worker.attempt(dataclasses.replace(request, timeout_secs=left), call)
            _check(reply, request)
            outcome = {"reply": reply}
            return reply
        except Busy as e:
            outcome = {"retry_after_secs": e.retry_after_secs}
            raise
        except AttemptError as e:
            outcome = {"failed": not (call.cancelled or self._closing.is_set())}
            if isinstance(e, Failed):
                tries.count_failure(standing)
            raise
        except InferenceError as e:
            tries.refuse(standing, e)
            raise
        finally:
            self._roster.ended(standing, request, self._clock.now(), **outcome)

    def _probe_one(self, now: float) -> None:
        """Look after one worker that is out, if it is time to."""
        standing = self._roster.due(now)
        if standing is None:
            return
        well = True
        try:
            standing.worker.probe(PROBE_SECS)
        except Unreachable:
            well = False
        finally:
            self._roster.probed(standing, self._clock.now(), well=well)


def _check(reply: GenerateReply, request: GenerateRequest) -> None:
    if reply.request_id != request.request_id:
        raise Failed(f"a reply to another request, {reply.request_id}")
    try:
        check_reply(reply, samples=request.sampling.n, min_version=request.min_version)
    except InferenceError as e:
        raise Failed(str(e)) from e


@dataclasses.dataclass(kw_only=True, eq=False)
class _Tries:
    """What one request has been through. ``asked`` since the last pause."""

    request: GenerateRequest
    deadline: float
    retries: int
    asked: set[Standing] = dataclasses.field(default_factory=set)
    given_up: set[Standing] = dataclasses.field(default_factory=set)
    failures: Counter = dataclasses.field(default_factory=Counter)
    refusals: list[InferenceError] = dataclasses.field(default_factory=list)
    error: Exception | None = None
    name: str = "no worker"

    def add(self, standing: Standing) -> None:
        self.asked.add(standing)
        self.name = standing.worker.name

    def count_failure(self, standing: Standing) -> None:
        self.failures[standing] += 1
        if self.failures[standing] > self.retries:
            self.given_up.add(standing)

    def refuse(self, standing: Standing, error: InferenceError) -> None:
        """One worker may be set up wrongly; two that refuse mean it."""
        self.given_up.add(standing)
        self.refusals.append(error)

    def give_up(self, now: float) -> NoReturn:
        """Raise what says most."""
        if self.refusals:
            raise self.refusals[0]
        given = self.request.timeout_secs
        error = self.error and (self.error.__cause__ or self.error)
        raise InferenceError(
            f"{self.name}: gave up after {given - (self.deadline - now):.1f} of {given:g} s: "
            f"{error or 'the deadline passed before it was sent'}"
        ) from self.error
