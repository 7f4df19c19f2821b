"""What the server needs of a worker."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from infra.contracts.records import GenerateReply, GenerateRequest
from infra.text.tokenizer import Tokenizer
from trainer.inference_worker.generation_job import Watch
from trainer.inference_worker.scheduler import Scheduler
from trainer.inference_worker.totals import Totals


class Backend(Protocol):
    """Every method may be called from any thread."""

    tokenizer: Tokenizer
    totals: Totals
    model: str
    """Its name on OpenAI's pages."""

    def submit(
        self,
        request: GenerateRequest,
        *,
        prompt_ids: np.ndarray | None = None,
        watch: Watch | None = None,
    ) -> Future[GenerateReply]:
        """As ``Scheduler.submit``."""

    def cancel(self, request_id: str, future: Future[GenerateReply]) -> None:
        """As ``Scheduler.cancel``."""

    def health(self) -> dict[str, Any]:
        """What ``GET /healthz`` answers; ``version`` is -1 before the first weights."""


@dataclass(frozen=True, kw_only=True)
class SchedulerBackend:
    """A scheduler alone, without a run around it: for measurements and tests."""

    scheduler: Scheduler
    tokenizer: Tokenizer
    model: str = "headrace"

    @property
    def totals(self) -> Totals:
        return self.scheduler.totals

    def submit(
        self,
        request: GenerateRequest,
        *,
        prompt_ids: np.ndarray | None = None,
        watch: Watch | None = None,
    ) -> Future[GenerateReply]:
        return self.scheduler.submit(request, prompt_ids=prompt_ids, watch=watch)

    def cancel(self, request_id: str, future: Future[GenerateReply]) -> None:
        self.scheduler.cancel(request_id, future)

    def health(self) -> dict[str, Any]:
        busy, queued = self.scheduler.load()
        version = self.scheduler.version
        status = "ok" if version >= 0 else "waiting for weights"
        return {"status": status, "version": version, "busy": busy, "queued": queued}
