"""When the trainer stops, and how it says so (DESIGN section 5, end of run)."""

from __future__ import annotations

from infra.storage import run_layout
from infra.storage.object_store import ObjectStore


class Stopping:
    """Asked before each step, and while the feed waits.

    Args:
        store: the run.
        updates: the last step.
        groups_per_step: fewer waiting groups than this make no step.
    """

    def __init__(self, store: ObjectStore, updates: int, groups_per_step: int) -> None:
        self._store = store
        self._updates = updates
        self._groups_per_step = groups_per_step
        self.preempted = False
        """Set by the SIGTERM handler."""

    def before_step(self, version: int) -> bool:
        """True when the step after ``version`` must not be started."""
        return (
            self.preempted or version >= self._updates or self._exists(run_layout.command("drain"))
        )

    def while_waiting(self, version: int, waiting: int) -> bool:
        """True when no further group is worth waiting for."""
        done = self._exists(run_layout.CONTROL_DONE) and waiting < self._groups_per_step
        return done or self.before_step(version)

    def _exists(self, key: str) -> bool:
        return self._store.read_with_token(key) is not None
