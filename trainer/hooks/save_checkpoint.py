"""Save a checkpoint every so many steps or seconds, whichever comes first."""

from __future__ import annotations

import time
from collections.abc import Callable

from infra.clock import Clock
from trainer.checkpoint import Progress
from trainer.checkpoint_copies import AnyCheckpoints
from trainer.config import CheckpointConfig
from trainer.loop import StepInfo
from trainer.state import TrainState


class SaveCheckpoint:
    """Counts what was learned and saves it with the state.

    Args:
        checkpoints: where to.
        config: how often.
        progress: what a restored checkpoint said, or a fresh one.
        clock: for ``every_secs``.
        diverged: asked at each save whether the next version's parent must say so.
    """

    def __init__(
        self,
        checkpoints: AnyCheckpoints,
        config: CheckpointConfig,
        progress: Progress,
        clock: Clock,
        diverged: Callable[[], bool],
    ) -> None:
        self._checkpoints = checkpoints
        self._config = config
        self._clock = clock
        self._diverged = diverged
        self._saved = progress.version
        self._saved_at = clock.now()
        self.progress = progress

    def after_step(self, info: StepInfo) -> None:
        started = time.perf_counter()
        self.progress = Progress(
            version=info.version,
            tokens=self.progress.tokens + int(info.metrics["tokens"]),
            groups=self.progress.groups + len(info.entry.groups),
            diverged=self._diverged(),
        )
        steps = info.version - self._saved
        secs = self._clock.now() - self._saved_at
        if steps >= self._config.every_steps or secs >= self._config.every_secs:
            self.save(info.state)
        info.seconds["checkpoint"] = time.perf_counter() - started

    def save(self, state: TrainState) -> None:
        """Save now (returns when the state is copied, not when it is durable)."""
        self._checkpoints.save(state, self.progress)
        self._saved, self._saved_at = self.progress.version, self._clock.now()
