"""What the server serves: a scheduler with its tokenizer, and what else its health page says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from infra.text.tokenizer import Tokenizer
from trainer.inference_worker.scheduler import Scheduler


@dataclass(frozen=True, kw_only=True)
class Backend:
    """A worker as its pages see it."""

    scheduler: Scheduler
    tokenizer: Tokenizer
    model: str = "headrace"
    """Its name on OpenAI's pages."""
    more_health: Callable[[], dict[str, Any]] = field(default=dict)
    """Further members of the health record."""
    drain: Callable[[], None] = field(default=lambda: None)
    """Ends the process once what runs is done."""

    def health(self) -> dict[str, Any]:
        """What ``GET /healthz`` answers; ``version`` is -1 before the first weights."""
        scheduler = self.scheduler
        busy, queued = scheduler.load()
        version, paused = scheduler.version, scheduler.paused
        return {
            "status": "waiting for weights" if version < 0 else "paused" if paused else "ok",
            "version": version,
            "digest": scheduler.digest,
            "tokenizer": self.tokenizer.digest,
            "slots": scheduler.slots,
            "busy": busy,
            "queued": queued,
            "paused": paused or "",
            **self.more_health(),
        }
