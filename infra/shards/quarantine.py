"""Quarantine: a marker beside the run that says which object is damaged, and how it showed.

The damaged object stays where it is, for whoever looks into it; readers skip what is marked.
"""

from __future__ import annotations

import json

from infra.contracts.errors import DamagedObject
from infra.storage import run_layout
from infra.storage.listing import keys_after
from infra.storage.object_store import ObjectStore

_SUFFIX = ".json"
_PREFIX = run_layout.quarantine("").removesuffix(_SUFFIX)


def quarantine(store: ObjectStore, key: str, problem: str) -> DamagedObject:
    """Mark ``key`` as damaged (once) and return the error to raise."""
    marker = {"key": key, "problem": problem}
    store.create(run_layout.quarantine(key), json.dumps(marker, sort_keys=True).encode())
    return DamagedObject(
        f"{store.url.rstrip('/')}/{key}: {problem}; it is quarantined "
        f"({run_layout.quarantine(key)}) and will not be used"
    )


def quarantined(store: ObjectStore) -> list[str]:
    """Keys of the objects that are marked as damaged."""
    markers = keys_after(store, _PREFIX)
    return [marker.removeprefix(_PREFIX).removesuffix(_SUFFIX) for marker in markers]
