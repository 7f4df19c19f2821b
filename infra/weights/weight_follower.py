"""Follows the weights of a run: LATEST -> tensors, checked -> whoever uses them, beside the old.

The last good version stays in use through every error: a store that cannot be reached, a damaged
version, one that was retired while it was read. What failed is tried again, ever more rarely.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

import numpy as np

from infra.clock import Clock
from infra.contracts.errors import ConfigError, StorageError
from infra.contracts.manifests import WeightManifest
from infra.storage.object_store import ObjectStore
from infra.weights.fetch_newest import Newest, fetch_newest
from infra.weights.leases import leased
from infra.weights.sync_times import SyncTimes
from infra.weights.weight_store import WeightReader

FIRST_REST_SECS, LONGEST_REST_SECS = 0.5, 60.0

Take = Callable[[WeightManifest, dict[str, np.ndarray]], None]


class Wake(Protocol):
    """Something that ends a wait early, such as ``infra.hints.HintListener``."""

    def wait(self, timeout_secs: float) -> object:
        """Return at a hint, at the latest after ``timeout_secs``."""


class WeightFollower:
    """One thread's work; whoever needs the newest version soon sends the wake-up hint.

    Args:
        weights: where versions come from.
        take: puts one to use; it may refuse by raising ``ConfigError``. A refused first version
            ends the follower; later the one in use stays, and the refused one is not tried again.
        times: notes when a version was seen and fetched.
        clock: spaces the attempts.
    """

    def __init__(self, weights: WeightReader, take: Take, times: SyncTimes, clock: Clock) -> None:
        self._weights, self._take, self._times, self._clock = weights, take, times, clock
        self._rest_secs, self._failed_at, self._failed_version = 0.0, 0.0, -1
        self._refused_version = -1
        self.version = -1
        """The newest version handed over."""
        self.trouble = ""
        """Why the newest version is not in use; empty when all is well."""
        self.failures = 0
        self.fallbacks = 0
        """How often an older, full version was taken because the newest could not be read."""

    def poll(self) -> bool:
        """Hand over the newest version if there is a newer one. Storage errors only count."""
        seen_at = self._clock.now()
        try:
            latest = self._weights.latest()
            known = max(self.version, self._refused_version)
            if latest is None or latest.version <= known:
                return False
            if latest.version == self._failed_version and self._resting(seen_at):
                return False
            self._failed_version = latest.version
            newest = fetch_newest(self._weights, above=self.version)
        except (StorageError, KeyError) as e:
            self.failures += 1
            self._rest(str(e.args[0]))
            return False
        if newest is None:
            return False
        try:
            self._hand_over(newest, seen_at)
        except ConfigError as e:
            if self.version < 0:
                raise
            self.failures += 1
            self._refused_version = newest.manifest.version
            self._rest(f"version {newest.manifest.version} is refused: {e}")
            return False
        return True

    def pin(self, version: int, store: ObjectStore) -> None:
        """Hand over exactly this version, leased while it is read; ``ConfigError`` without it."""
        seen_at = self._clock.now()
        try:
            with leased(store, self._weights, version, self._clock, who="pinned"):
                manifest, arrays = self._weights.manifest(version), self._weights.fetch(version)
        except KeyError as e:
            known = self._weights.versions()
            raise ConfigError(f"there is no version {version}; committed: {known}") from e
        self._hand_over(Newest(manifest=manifest, arrays=arrays), seen_at)

    def run(self, wake: Wake, stopped: threading.Event, poll_secs: float) -> None:
        """Poll at every hint and every ``poll_secs`` until ``stopped``."""
        while not stopped.is_set():
            if not self.poll():
                wake.wait(poll_secs)

    def _hand_over(self, newest: Newest, seen_at: float) -> None:
        version = newest.manifest.version
        self._times.begin(newest.manifest, seen_at)
        self._take(newest.manifest, newest.arrays)
        self._times.mark(version, "loaded")
        self.version = version
        if newest.fallback_reason:
            self.fallbacks += 1
            self._rest(f"version {version} is used instead: {newest.fallback_reason}")
        else:
            self._rest_secs, self.trouble = 0.0, ""

    def _rest(self, trouble: str) -> None:
        self.trouble = trouble
        self._rest_secs = min(max(2 * self._rest_secs, FIRST_REST_SECS), LONGEST_REST_SECS)
        self._failed_at = self._clock.now()

    def _resting(self, now: float) -> bool:
        """Whether the last failure is too fresh; a clock that was set back ends the rest."""
        return 0 <= now - self._failed_at < self._rest_secs
