"""The weight store: immutable versions, visible only when whole. Bytes and names; knows no JAX."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from infra.contracts.manifests import WeightManifest

Cuts = Mapping[str, tuple[int, int]]
"""Tensor name -> (axis, count): into how many equal pieces along which axis it is cut."""


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A box of one tensor: ``tensor[start[0] : start[0] + shape[0], ...]``, every axis given."""

    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]


class WeightReader(Protocol):
    """What a worker needs. A reader never mixes two versions."""

    def latest(self) -> WeightManifest | None:
        """The manifest that LATEST points to, or None before the first publication."""

    def manifest(self, version: int) -> WeightManifest:
        """Raises ``KeyError`` if that version is not committed (or was retired)."""

    def fetch(
        self, version: int, wanted: Iterable[str | TensorSlice] | None = None
    ) -> dict[str, np.ndarray]:
        """Read tensors or boxes of tensors (None: all), by name, every byte handed out checked.

        Arrays may be read-only views of a mapped file. ``ValueError``: a name twice, or a box that
        does not lie in its tensor. ``KeyError``: no such version (any more) or no such tensor.
        """

    def versions(self) -> list[int]:
        """Committed versions, ascending."""


class WeightStore(WeightReader, Protocol):
    """Parts, then manifest, then pointer. Versions only grow."""

    def publish(
        self,
        version: int,
        arrays: Mapping[str, np.ndarray],
        *,
        parent: str = "",
        cuts: Cuts | None = None,
        **facts: object,
    ) -> WeightManifest:
        """Commit one version. Idempotent: the same arrays again return the same manifest.

        ``facts``: optimizer_step, model_config, tokenizer_digest, cast, incarnation, epoch,
        updated_at (see the manifest). Raises ``StorageError`` if the version exists with other
        weights or LATEST is newer, ``Fenced`` if a newer incarnation publishes.
        """

    def retire(self, keep: Iterable[int]) -> list[int]:
        """Delete every version not in ``keep`` (nor LATEST, nor a base); return those deleted."""
