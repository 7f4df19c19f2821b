"""``headrace weights RUN sync``: how long versions took to reach the workers, by part."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import numpy as np

from infra.metrics import MetricsReader
from infra.storage.object_store import ObjectStore
from infra.weights.sync_times import PARTS, PREFIX

_NAMES = (*(f"{part}_secs" for part in PARTS), "sync_secs")
_PERCENTILES = (50, 90, 100)


def report(store: ObjectStore, location: str, as_json: bool) -> int:
    """Print percentiles over all workers and versions; 0 also where there is nothing to say."""
    rows = sync_rows(store)
    found = percentiles(rows)
    if as_json:
        print(json.dumps({"versions": len(rows), "seconds": found}))
    elif not rows:
        print(f"{location}: no worker has used a version yet")
    else:
        print("\n".join([_HEAD, *(_line(name, values) for name, values in found.items())]))
        print(f"\n{len(rows)} versions taken by workers; sync is the way from 'optimizer state")
        print("updated' to 'first token under it'")
    return 0


def sync_rows(store: ObjectStore) -> list[dict[str, float]]:
    """The rows that workers wrote, one per version and worker."""
    roles = store.list_folders("metrics")
    rows = [row for role in roles for row in MetricsReader(store, role).poll()]
    return [row for row in rows if f"{PREFIX}sync_secs" in row]


def percentiles(rows: Sequence[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Seconds by part and percentile, e.g. ``{"fetch": {"p50": 0.1, ...}, ...}``."""
    return {
        name.removesuffix("_secs"): _of(row[PREFIX + name] for row in rows)
        for name in (_NAMES if rows else ())
    }


def _of(values: Iterable[float]) -> dict[str, float]:
    found = np.percentile(list(values), _PERCENTILES)
    return {f"p{p}": round(float(v), 4) for p, v in zip(_PERCENTILES, found, strict=True)}


_HEAD = f"{'seconds':<14}{'median':>9}{'p90':>9}{'most':>9}"


def _line(name: str, values: dict[str, float]) -> str:
    return f"{name:<14}" + "".join(f"{value:9.3f}" for value in values.values())
