"""What a weight server holds: whole, checked versions in memory, and which of them may be seen.

A version arrives first (``stage``) and is seen later (``commit``): the publisher commits once
LATEST has moved in the store, so nobody generates with a version that the store may never get.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from infra.contracts.errors import Fenced, StorageError
from infra.contracts.manifests import WeightManifest


@dataclass(frozen=True, kw_only=True, eq=False)
class HeldVersion:
    """One version, whole."""

    manifest: WeightManifest
    arrays: Mapping[str, np.ndarray]
    """Read-only, little-endian, C order."""


class HeldVersions:
    """The newest ``keep`` versions, plus at most one that is staged. For many threads.

    Dropping a version frees it when the last answer that sends it ends.
    """

    def __init__(self, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(f"keep = {keep}; at least 1")
        self._keep = keep
        self._lock = threading.Lock()
        self._seen: dict[int, HeldVersion] = {}
        self._staged: HeldVersion | None = None
        self._publisher: tuple[int, str] | None = None

    def admit(self, manifest: WeightManifest) -> None:
        """Let the manifest's publisher in; it replaces those of older epochs.

        Raises:
            Fenced: a newer trainer, or another one of the same epoch, publishes here.
            StorageError: the version is not newer than what is here already.
        """
        with self._lock:
            self._admit(manifest)

    def stage(self, held: HeldVersion) -> None:
        """Hold a version that nobody sees yet, instead of the one staged before. See ``admit``."""
        with self._lock:
            if self._admit(held.manifest):
                self._staged = held

    def commit(self, manifest: WeightManifest) -> None:
        """Show the staged version, under the manifest that the store has. Idempotent.

        Raises ``Fenced``, and ``StorageError`` if that version, with these weights, is not staged.
        """
        with self._lock:
            if self._admit(manifest) and not self._promote(manifest):
                raise StorageError(
                    f"weights version {manifest.version} ({manifest.digest}) cannot be committed: "
                    "the server does not hold it (any more); put it again"
                )

    def promote(self, manifest: WeightManifest) -> bool:
        """Show the staged version if it is this one, as the store's manifest now proves."""
        with self._lock:
            return self._promote(manifest)

    def add(self, held: HeldVersion) -> None:
        """Show a version that was read from the store or from another server."""
        with self._lock:
            self._add(held)

    def get(self, version: int) -> HeldVersion | None:
        with self._lock:
            return self._seen.get(version)

    def newest(self) -> WeightManifest | None:
        with self._lock:
            return self._seen[max(self._seen)].manifest if self._seen else None

    def versions(self) -> list[int]:
        with self._lock:
            return sorted(self._seen)

    def _admit(self, manifest: WeightManifest) -> bool:
        """Whether there is anything to do: not if it is here already, with the same weights."""
        mine, theirs = (manifest.epoch, manifest.incarnation), self._publisher
        if theirs and (mine[0] < theirs[0] or (0 < mine[0] == theirs[0] and mine != theirs)):
            raise Fenced(
                f"weights version {manifest.version}: trainer {mine[1]!r} (epoch {mine[0]}) was "
                f"replaced at the server by trainer {theirs[1]!r} (epoch {theirs[0]})"
            )
        newest = max(self._seen, default=-1)
        there = self._seen.get(manifest.version)
        if there is not None and there.manifest.digest == manifest.digest:
            self._publisher = mine
            return False
        if manifest.version <= newest:
            raise StorageError(
                f"weights version {manifest.version}: the server has {newest} already and versions "
                f"only grow; put {newest + 1} or later"
            )
        self._publisher = mine
        return True

    def _promote(self, manifest: WeightManifest) -> bool:
        staged = self._staged
        if staged is None or (staged.manifest.version, staged.manifest.digest) != (
            manifest.version,
            manifest.digest,
        ):
            return False
        self._staged = None
        self._add(HeldVersion(manifest=manifest, arrays=staged.arrays))
        return True

    def _add(self, held: HeldVersion) -> None:
        self._seen[held.manifest.version] = held
        for version in sorted(self._seen)[: -self._keep]:
            del self._seen[version]
