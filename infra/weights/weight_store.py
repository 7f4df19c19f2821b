"""The weight store: immutable versions, visible only when whole. Bytes and names; knows no JAX."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import numpy as np

from infra.contracts.manifests import WeightManifest


class WeightStore(Protocol):
    """Parts, then manifest, then pointer. Versions only grow; a reader never mixes two."""

    def publish(
        self, version: int, arrays: Mapping[str, np.ndarray], *, parent: str = "", **facts: object
    ) -> WeightManifest:
        """Commit one version. Idempotent: the same arrays again return the same manifest.

        ``facts``: optimizer_step, model_config, tokenizer_digest, incarnation (see the manifest).
        Raises ``StorageError`` if the version exists with other weights or LATEST is newer.
        """

    def latest(self) -> WeightManifest | None:
        """The manifest that LATEST points to, or None before the first publication."""

    def manifest(self, version: int) -> WeightManifest:
        """Raises ``KeyError`` if that version is not committed (or was retired)."""

    def fetch(self, version: int, names: Iterable[str] | None = None) -> dict[str, np.ndarray]:
        """Read tensors, every byte checked. Arrays may be read-only views of a mapped file."""

    def versions(self) -> list[int]:
        """Committed versions, ascending."""

    def retire(self, keep: Iterable[int]) -> list[int]:
        """Delete every version not in ``keep`` (and not LATEST); return those deleted."""
