"""Pull-through: what a weight server does not hold, it reads once from where it stands behind.

Behind the root stands the store (so a restarted server fills itself again, version by version, as
it is asked); behind a relay stand its upstream and, should that be gone, the store. However many
readers ask, a version is fetched once. A version is passed on only when it is whole and checked.

One relay for each host of workers is how a host fetches a version once. Without a relay every
worker process fetches for itself.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future

from infra.clock import Clock
from infra.contracts.errors import HeadraceError, StorageError
from infra.contracts.manifests import WeightManifest
from infra.weights.flight_versions import HeldVersion, HeldVersions
from infra.weights.flight_wire import known_errors
from infra.weights.tensor_file import bytes_of
from infra.weights.weight_store import WeightReader


class PullThrough:
    """A ``HeldVersions`` with a source behind it. For many threads; the source sees one at a time.

    Args:
        held: what is in memory.
        source: where the rest comes from, or None.
        clock: spaces the polls.
        poll_secs: the source is asked for its latest version at most this often.
    """

    def __init__(
        self, held: HeldVersions, source: WeightReader | None, clock: Clock, poll_secs: float
    ) -> None:
        self._held, self._source, self._clock = held, source, clock
        self._poll_secs = poll_secs
        self._polled_at = -poll_secs
        self._source_lock = threading.Lock()
        self._newest: WeightManifest | None = None
        self._fetching: dict[int, Future[HeldVersion]] = {}
        self._lock = threading.Lock()
        self.fetches = 0
        """Versions read from the source."""
        self.last_error = ""
        """Why the source was last of no use."""

    def latest(self) -> WeightManifest | None:
        """The newest version held or known to the source; never an older one than before.

        Raises what the source raises, but only if nothing is known at all.
        """
        problem = self._poll()
        self._note(self._held.newest())
        if self._newest is None and problem is not None:
            raise problem
        return self._newest

    def check(self, manifest: WeightManifest) -> None:
        """Raise ``StorageError`` unless the source has this version, with these weights."""
        if self._source is None:
            return
        with self._source_lock:
            try:
                digest = self._source.manifest(manifest.version).digest
            except KeyError:
                digest = "nothing"
        if digest != manifest.digest:
            raise StorageError(
                f"weights version {manifest.version}: {manifest.digest} cannot be committed, the "
                f"store has {digest}; publish it there first"
            )

    def manifest(self, version: int) -> WeightManifest:
        """As ``version``, but nothing is fetched for it."""
        newest = self.latest()
        if newest is not None and newest.version == version:
            return newest
        held = self._held.get(version)
        if held is not None or self._source is None:
            return (held or self.version(version)).manifest
        with self._source_lock:
            return self._source.manifest(version)

    def version(self, version: int) -> HeldVersion:
        """Return a version, from memory or through the source.

        Raises ``KeyError`` if nobody has it, and what the source raises.
        """
        held = self._held.get(version)
        if held is not None:
            return held
        if self._source is None:
            there = ", ".join(map(str, self._held.versions())) or "none"
            raise KeyError(f"weights version {version} is not in the server, which has {there}")
        with self._lock:
            future = self._fetching.get(version)
            mine = future is None
            if mine:
                future = self._fetching[version] = Future()
        if mine:
            try:
                future.set_result(self._fetch(version))
            except Exception as e:
                future.set_exception(known_errors(e))
            finally:
                with self._lock:
                    del self._fetching[version]
        return future.result()

    def _fetch(self, version: int) -> HeldVersion:
        with self._source_lock:
            manifest = self._source.manifest(version)
            if self._held.promote(manifest) and (held := self._held.get(version)) is not None:
                return held
            held = self._held.get(version)  # the fetch before this one may have brought it
            if held is not None:
                return held
            arrays = self._source.fetch(version, None)
            self.fetches += 1
        held = HeldVersion(
            manifest=manifest,
            arrays={
                name: bytes_of(array).view(array.dtype.newbyteorder("<")).reshape(array.shape)
                for name, array in arrays.items()
            },
        )
        self._held.add(held)
        return held

    def _poll(self) -> Exception | None:
        """Ask the source unless it was asked just now, or is busy: nobody waits for a fetch."""
        if self._source is None or not self._source_lock.acquire(blocking=self._newest is None):
            return None
        try:
            if 0 <= self._clock.now() - self._polled_at < self._poll_secs:
                return None
            self._polled_at = self._clock.now()
            found = self._source.latest()
            if found is not None:
                self._held.promote(found)
            self._note(found)
        except HeadraceError as e:
            self.last_error = str(e)
            return e
        finally:
            self._source_lock.release()
        return None

    def _note(self, found: WeightManifest | None) -> None:
        with self._lock:
            if found is not None and (self._newest is None or found.version > self._newest.version):
                self._newest = found
