"""Leases: ``control/leases/<name>.json`` says who still needs a version, for long.

Written by an evaluation, a branch, an export; kept alive by refreshing, gone by ``release`` or by
running out. Clocks of two machines meet here, so:

* A lease is over only when the collector's clock is past ``expires_at`` by over ``MARGIN_SECS``.
  One that lies in the future, however far, is alive.
* A holder's time never goes back: if its clock does, the time before goes on from there, and a
  refresh never lowers ``expires_at``. It starts no earlier than the version's manifest was written,
  by the publisher's clock, which is the collector's.
* A collector's clock that jumped back keeps leases longer. One that jumped ahead by more than the
  margin and the rest of the lease can end it early: its reader then gets ``KeyError``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

from infra.clock import Clock
from infra.contracts.json_codec import from_json, to_marker
from infra.storage import run_layout
from infra.storage.listing import keys_after
from infra.storage.object_store import ObjectStore
from infra.weights.weight_store import WeightReader

MARGIN_SECS = 600.0
LEASE_SECS = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """One reader's claim to a version."""

    version: int
    expires_at: float


class HeldLease:
    """A lease of this process. Refresh it well before ``secs`` have passed; release it at the end.

    Args:
        store: the run.
        weights: its weight store; says whether the version is still there.
        name: of the reader, unique: a lease of that name is taken over.
        version: what must stay.
        secs: how long it lasts without being refreshed.
        clock: this machine's.

    Raises:
        KeyError: the version is not committed, or was retired before the lease was written.
    """

    def __init__(
        self,
        store: ObjectStore,
        weights: WeightReader,
        name: str,
        version: int,
        *,
        secs: float,
        clock: Clock,
    ) -> None:
        self._store, self._key, self._version = store, run_layout.weights_lease(name), version
        self._secs, self._clock = secs, clock
        self._time = max(clock.now(), weights.manifest(version).created_at)
        self._read_at = clock.now()
        self._write()
        weights.manifest(version)  # a collector may have looked before the lease was there

    def refresh(self) -> None:
        """Let it last ``secs`` from now."""
        self._time += max(self._clock.now() - self._read_at, 0.0)
        self._read_at = self._clock.now()
        self._write()

    def release(self) -> None:
        """Give it up."""
        self._store.delete(self._key)

    def _write(self) -> None:
        while True:
            found = self._store.read_with_token(self._key)
            ends = self._time + self._secs
            if found is not None:
                old = _decode(self._store, self._key, found[0])
                ends = max(ends, old.expires_at) if old.version == self._version else ends
            lease = Lease(version=self._version, expires_at=ends)
            if self._store.compare_and_swap(self._key, to_marker(lease), found and found[1]):
                return


@contextlib.contextmanager
def leased(
    store: ObjectStore, weights: WeightReader, version: int, clock: Clock, *, who: str
) -> Iterator[None]:
    """Keep a version while this lasts, an hour at most (a reader that dies must not keep it).

    Raises:
        KeyError: the version is not committed, or was retired before the lease was written.
    """
    name = f"{who}-{os.getpid()}-{os.urandom(4).hex()}"
    lease = HeldLease(store, weights, name, version, secs=LEASE_SECS, clock=clock)
    try:
        yield
    finally:
        lease.release()


def leases(store: ObjectStore, now: float) -> dict[str, Lease]:
    """The leases that are not over at ``now``, by name.

    Raises:
        SchemaMismatch: a lease cannot be read; nothing may be retired before that is put right.
    """
    alive = {}
    for key in list(keys_after(store, run_layout.WEIGHTS_LEASES)):
        found = store.read_with_token(key)
        if found is not None:
            lease = _decode(store, key, found[0])
            if now <= lease.expires_at + MARGIN_SECS:
                name = key.removeprefix(run_layout.WEIGHTS_LEASES).removesuffix(".json")
                alive[name] = lease
    return alive


def _decode(store: ObjectStore, key: str, data: bytes) -> Lease:
    return from_json(Lease, data, name=f"{store.url.rstrip('/')}/{key}")
