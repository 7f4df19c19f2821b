"""Who is well, who is busy, who gets the next request: the pool's view of its workers.

Load is what this process has in flight, in samples: a request may ask for 1 or for 64. A worker
whose last seen version is too old counts as one request busier, not as unusable: it will pull, and
if it were shunned it could never show that it has. A worker that fails ``EJECT_AFTER`` times in a
row is left out until a probe says that it is well; probes get rarer. If everybody is out, everybody
is used: being out means nothing then.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from infra.contracts.records import GenerateReply, GenerateRequest
from infra.inference.worker import Worker

EJECT_AFTER = 3
FIRST_EJECTION_SECS, LONGEST_EJECTION_SECS = 1.0, 60.0
MANY = 8
"""From so many workers on two are drawn and the less loaded one is taken: several processes, each
with its own counts, would else all run to the same one."""


@dataclass(kw_only=True, eq=False)
class Standing:
    """One worker and what is known of it. Changed by the roster alone, under its lock."""

    worker: Worker
    in_flight: int = 0
    """Samples."""
    failures: int = 0
    """In a row."""
    ejected_until: float | None = None
    """When to probe; None: in use."""
    ejection_secs: float = FIRST_EJECTION_SECS
    probing: bool = False
    retry_at: float = 0.0
    """It asked to be left alone until then."""
    version: int | None = None
    """Newest seen in a reply."""
    attempts: int = 0
    failed: int = 0
    busy: int = 0
    ejections: int = 0
    hedges: int = 0
    """Second copies that were sent here."""


class WorkerRoster:
    """Safe from several threads. Times are the caller's clock."""

    def __init__(self, workers: Sequence[Worker], jitter: random.Random) -> None:
        self.standings = tuple(Standing(worker=worker) for worker in workers)
        self._jitter = jitter
        self._lock = threading.Lock()

    def take(
        self,
        request: GenerateRequest,
        now: float,
        *,
        asked: Collection[Standing] = (),
        given_up: Collection[Standing] = (),
    ) -> Standing | None:
        """Choose a worker and count the request as in flight there; give it back with ``ended``.

        Args:
            request: To be sent.
            now: The time.
            asked: Not these again yet.
            given_up: Not these at all.

        Returns:
            None where nobody is left now.
        """
        with self._lock:
            usable = [s for s in self.standings if s not in given_up]
            well = [s for s in usable if s.ejected_until is None] or usable
            free = [s for s in well if s not in asked and s.retry_at <= now]
            if not free:
                return None
            if len(free) >= MANY:
                free = self._jitter.sample(free, 2)
            chosen = min(free, key=lambda s: (self._load(s, request), self._jitter.random()))
            chosen.in_flight += request.sampling.n
            chosen.attempts += 1
            return chosen

    def ended(
        self,
        standing: Standing,
        request: GenerateRequest,
        now: float,
        *,
        reply: GenerateReply | None = None,
        failed: bool = False,
        retry_after_secs: float | None = None,
    ) -> None:
        """An attempt is over: with a reply, failed, busy (``retry_after_secs``) or of no matter."""
        with self._lock:
            standing.in_flight -= request.sampling.n
            if reply is not None:
                standing.failures = 0
                standing.ejected_until, standing.ejection_secs = None, FIRST_EJECTION_SECS
                standing.version = max((v for v, _ in reply.weights), default=standing.version)
            if retry_after_secs is not None:
                standing.busy += 1
                standing.failures = 0
                standing.retry_at = max(standing.retry_at, now + retry_after_secs)
            if failed:
                standing.failed += 1
                standing.failures += 1
                if standing.failures >= EJECT_AFTER and standing.ejected_until is None:
                    self._eject(standing, now)

    def due(self, now: float) -> Standing | None:
        """An ejected worker whose time for a probe has come; the caller probes, then ``probed``."""
        with self._lock:
            for standing in self.standings:
                until = standing.ejected_until
                if until is not None and until <= now and not standing.probing:
                    standing.probing = True
                    return standing
        return None

    def probed(self, standing: Standing, now: float, *, well: bool) -> None:
        """Take it back on trial (one more failure and it is out again), or wait twice as long."""
        with self._lock:
            standing.probing = False
            if well:
                standing.ejected_until, standing.failures = None, EJECT_AFTER - 1
            elif standing.ejected_until is not None:
                self._eject(standing, now)

    def next_free_at(self, given_up: Collection[Standing]) -> float:
        """When the first worker that wants to be left alone may be asked again."""
        with self._lock:
            return min((s.retry_at for s in self.standings if s not in given_up), default=0.0)

    def any_well(self, given_up: Collection[Standing]) -> bool:
        """Whether anybody is in use and may still be asked."""
        with self._lock:
            return any(s.ejected_until is None for s in self.standings if s not in given_up)

    def counters(self) -> dict[str, float]:
        """Per worker, by its number, and in all."""
        with self._lock:
            rows = {
                f"worker_{i}": {
                    "in_flight_samples": s.in_flight,
                    "attempts": s.attempts,
                    "failures": s.failed,
                    "busy": s.busy,
                    "ejected": float(s.ejected_until is not None),
                    "ejections": s.ejections,
                    "hedges": s.hedges,
                }
                for i, s in enumerate(self.standings)
            }
        return {
            f"pipeline/{w}/{name}": float(v) for w, row in rows.items() for name, v in row.items()
        }

    def count_hedge(self, standing: Standing) -> None:
        with self._lock:
            standing.hedges += 1

    @staticmethod
    def _load(standing: Standing, request: GenerateRequest) -> int:
        old = standing.version is not None and standing.version < request.min_version
        return standing.in_flight + (request.sampling.n if old else 0)

    @staticmethod
    def _eject(standing: Standing, now: float) -> None:
        standing.ejections += standing.ejected_until is None
        standing.ejected_until = now + standing.ejection_secs
        standing.ejection_secs = min(2 * standing.ejection_secs, LONGEST_EJECTION_SECS)
