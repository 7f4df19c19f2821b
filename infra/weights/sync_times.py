"""How long a version takes from 'optimizer state updated' to 'first token under it', by part.

    updated -> published -> seen -> fetched -> loaded -> swapped -> first token
    (trainer's clock)       (this reader's clock)

Sync time is the whole way (R8: anything less hides the waiting). The first two moments are read off
the trainer's clock: across machines their distance to ``seen`` is as good as the clocks agree.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from infra.clock import Clock
from infra.contracts.manifests import WeightManifest

PREFIX = "worker/weights/"
MOMENTS = ("updated", "published", "seen", "fetched", "loaded", "swapped", "first_token")
PARTS = ("publish", "visible", "fetch", "load", "swap", "first_token")
"""The ways between the moments, one fewer."""


class SyncTimes:
    """Takes the moments of each version; safe from several threads.

    Args:
        clock: stamps the moments.
        emit: gets one row per version that produced a token. A version that a newer one overtook
            has none.
    """

    def __init__(self, clock: Clock, emit: Callable[[dict[str, float]], None]) -> None:
        self._clock, self._emit = clock, emit
        self._lock = threading.Lock()
        self._open: dict[int, dict[str, float]] = {}

    def begin(self, manifest: WeightManifest, seen_at: float) -> None:
        """A version was seen at ``seen_at`` and has been fetched now."""
        published = manifest.created_at
        moments = {
            "updated": manifest.updated_at or published,
            "published": published,
            "seen": seen_at,
            "fetched": self._clock.now(),
        }
        with self._lock:
            self._open[manifest.version] = moments

    def mark(self, version: int, moment: str) -> None:
        """Note ``loaded``, ``swapped`` or ``first_token``; the last one writes the row."""
        now = self._clock.now()
        with self._lock:
            moments = self._open.get(version)
            if moments is None:
                return
            moments[moment] = now
            if moment != MOMENTS[-1]:
                return
            self._open = {v: m for v, m in self._open.items() if v > version}
        at = [moments[name] for name in MOMENTS]
        secs = {part: at[i + 1] - at[i] for i, part in enumerate(PARTS)}
        row = {f"{PREFIX}{part}_secs": value for part, value in secs.items()}
        self._emit({f"{PREFIX}version": version, f"{PREFIX}sync_secs": at[-1] - at[0], **row})
