"""Where a worker gets weights: the fast server first, the store when that is of no use.

The store is the durable truth. What the server says is believed only where the store's manifest of
that version agrees, so a worker never generates with a version that the store may not have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import numpy as np

from infra.clock import Clock, SystemClock
from infra.contracts.errors import DamagedObject, HeadraceError
from infra.contracts.manifests import WeightManifest
from infra.weights.weight_store import TensorSlice, WeightReader

T = TypeVar("T")
_REMEMBERED = 8


class FastWeights:
    """Implements ``WeightReader`` over two others. Not for several threads at once.

    Args:
        fast: usually ``FlightWeights``; any error of it means the store.
        durable: the store.
        clock: spaces the attempts.
        first_backoff_secs: how long ``fast`` is left alone after an error; doubles up to
            ``last_backoff_secs`` while errors go on.
        store_every_secs: the store's LATEST is read at least this often, should ``fast`` lag.
    """

    def __init__(
        self,
        fast: WeightReader,
        durable: WeightReader,
        *,
        clock: Clock | None = None,
        first_backoff_secs: float = 0.5,
        last_backoff_secs: float = 30.0,
        store_every_secs: float = 5.0,
    ) -> None:
        self._fast, self._durable = fast, durable
        self._clock = clock or SystemClock()
        self._first, self._last = first_backoff_secs, last_backoff_secs
        self._store_every = store_every_secs
        self._backoff, self._left_alone_at, self._store_read_at = 0.0, 0.0, -store_every_secs
        self._truth: dict[int, WeightManifest] = {}
        self._newest: WeightManifest | None = None
        self.fast_fetches = 0
        self.store_fetches = 0
        self.errors = 0
        """How often ``fast`` was asked and was of no use."""
        self.last_error = ""
        """Why, the last time."""

    def latest(self) -> WeightManifest | None:
        """The newest version that the store has; never an older one than returned before."""
        found = self._try(lambda: self._agreed(self._fast.latest()))
        if found is None or self._clock.now() - self._store_read_at >= self._store_every:
            self._store_read_at = self._clock.now()
            stored = self._durable.latest()
            if stored is not None and (found is None or stored.version > found.version):
                found = self._remember(stored)
        if found is not None and (self._newest is None or found.version > self._newest.version):
            self._newest = found
        return self._newest

    def manifest(self, version: int) -> WeightManifest:
        """The store's. Raises ``KeyError`` if it has no such version (any more)."""
        return self._truth.get(version) or self._remember(self._durable.manifest(version))

    def versions(self) -> list[int]:
        """The store's."""
        return self._durable.versions()

    def fetch(
        self, version: int, wanted: Iterable[str | TensorSlice] | None = None
    ) -> dict[str, np.ndarray]:
        """Read from the server or, failing that, from the store; never from both."""
        wanted = None if wanted is None else list(wanted)

        def fast() -> dict[str, np.ndarray]:
            self._agreed(self._fast.manifest(version))
            return self._fast.fetch(version, wanted)

        found = self._try(fast)
        if found is not None:
            self.fast_fetches += 1
            return found
        found = self._durable.fetch(version, wanted)
        self.store_fetches += 1
        return found

    def _agreed(self, shown: WeightManifest | None) -> WeightManifest | None:
        """What the server shows, if the store has the same; else raise."""
        if shown is None:
            return None
        stored = self.manifest(shown.version)
        if stored.digest != shown.digest:
            raise DamagedObject(
                f"weights version {shown.version}: the server has {shown.digest}, the store "
                f"{stored.digest}"
            )
        return stored

    def _try(self, ask: Callable[[], T]) -> T | None:
        """Ask the server unless it failed just now. A version it lacks is no reason to leave it."""
        since = self._clock.now() - self._left_alone_at
        if 0 <= since < self._backoff:
            return None
        try:
            answer = ask()
        except (HeadraceError, KeyError) as e:
            self.errors += 1
            self.last_error = str(e.args[0]) if e.args else type(e).__name__
            if isinstance(e, HeadraceError):
                self._backoff = min(max(self._backoff * 2, self._first), self._last)
                self._left_alone_at = self._clock.now()
            return None
        self._backoff = 0.0
        return answer

    def _remember(self, manifest: WeightManifest) -> WeightManifest:
        self._truth[manifest.version] = manifest
        while len(self._truth) > _REMEMBERED:
            del self._truth[min(self._truth)]
        return manifest
