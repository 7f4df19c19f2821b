"""The newest version that can be read whole, with a way back to a full one when LATEST cannot."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from infra.contracts.errors import StorageError
from infra.contracts.manifests import WeightManifest
from infra.weights.weight_store import TensorSlice, WeightReader


@dataclass(frozen=True, kw_only=True, eq=False)
class Newest:
    """A version and what was wanted of it."""

    manifest: WeightManifest
    arrays: dict[str, np.ndarray]
    fallback_reason: str = ""
    """Why this is not LATEST but an older, full version; to be counted and said aloud."""


def fetch_newest(
    weights: WeightReader, wanted: Iterable[str | TensorSlice] | None = None, *, above: int = -1
) -> Newest | None:
    """Fetch LATEST; if it or its base is damaged or missing, the newest sound full version.

    Args:
        weights: the store, or something in front of it.
        wanted: as for ``fetch``.
        above: only versions above it; None is returned if there is none.

    Raises:
        StorageError: LATEST is damaged and so is every full version above ``above``.
        KeyError: no such tensor, or a base is missing and there is no full version instead.
    """
    wanted = None if wanted is None else list(wanted)
    seen: list[int] = []
    while True:
        try:
            manifest = weights.latest()
            if manifest is None or manifest.version <= above:
                return None
            seen.append(manifest.version)
            return Newest(manifest=manifest, arrays=weights.fetch(manifest.version, wanted))
        except (StorageError, KeyError) as e:
            problem = e
        if seen[-2:] == seen[-1:] * 2 or not seen:
            break  # the same version twice: it did not move on while we read
    for version in reversed(weights.versions()):
        with contextlib.suppress(StorageError, KeyError):
            manifest = weights.manifest(version)
            if version > above and manifest.base is None:
                arrays = weights.fetch(version, wanted)
                reason = str(problem.args[0])
                return Newest(manifest=manifest, arrays=arrays, fallback_reason=reason)
    raise problem
