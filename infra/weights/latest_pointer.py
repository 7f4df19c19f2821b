"""``weights/LATEST``, the one pointer of a run: ``{"digest":"1f..","version":12}``; only grows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from infra.contracts.errors import SchemaMismatch
from infra.contracts.json_codec import from_json, to_json
from infra.storage import run_layout
from infra.storage.object_store import ObjectStore

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class LatestPointer:
    """Which version is the newest, and the digest its manifest must have."""

    version: int
    digest: str


def read_latest(store: ObjectStore) -> LatestPointer | None:
    """Return what LATEST says, or None before the first publication."""
    found = store.read_with_token(run_layout.WEIGHTS_LATEST)
    return found and decode(LatestPointer, store, run_layout.WEIGHTS_LATEST, found[0])


def advance_latest(store: ObjectStore, wanted: LatestPointer) -> None:
    """Move LATEST up to ``wanted``; leave it if it is there or beyond."""
    while True:
        found = store.read_with_token(run_layout.WEIGHTS_LATEST)
        token = None
        if found is not None:
            data, token = found
            current = decode(LatestPointer, store, run_layout.WEIGHTS_LATEST, data)
            if current.version >= wanted.version:
                return
        if store.compare_and_swap(run_layout.WEIGHTS_LATEST, to_json(wanted), token):
            return


def decode(cls: type[T], store: ObjectStore, key: str, data: bytes) -> T:
    """``from_json`` whose errors name the object."""
    try:
        return from_json(cls, data)
    except SchemaMismatch as e:
        raise type(e)(f"{store.url}/{key}: {e}") from e
