"""What runs after a step. Hooks run in the order given, on the loop's own thread."""

from __future__ import annotations

from typing import Protocol

from trainer.loop import StepInfo


class Hook(Protocol):
    """Sees every step once, right after it was computed."""

    def after_step(self, info: StepInfo) -> None:
        """Act on the step. May add to ``info.seconds`` and ``info.metrics``; keeps no state."""
