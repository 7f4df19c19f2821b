"""What is written in the fault tables, and what a reader makes of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from infra.clock import ManualClock
from infra.contracts.json_codec import to_json
from infra.contracts.manifests import LedgerEntry
from infra.ledger import ledger
from infra.ledger.audit import audit
from infra.ledger.group_index import GroupIndex
from infra.shards.shard_index import ShardIndex
from infra.shards.shard_reader import read_shard, verify_shard
from infra.shards.shard_writer import write_shard
from infra.storage.local_store import LocalStore
from infra.storage.object_store import ObjectStore
from infra.weights.stored_weights import StoredWeights
from tests.builders import RECIPE, make_group
from tests.infra.faults.dying import DyingStore, Moment, watch_files


@dataclass(frozen=True, kw_only=True)
class Writer:
    """One kind of commit: what was there before, the commit, the next one, what readers see."""

    before: Callable[[ObjectStore], object]
    write: Callable[[ObjectStore], object]
    then: Callable[[ObjectStore], object]
    seen: Callable[[ObjectStore], object]


def weights_of(version: int) -> dict[str, np.ndarray]:
    """Every tensor says which version it is of."""
    return {f"layer{i}": np.full((4, 4), version, np.float32) for i in range(3)}


def _weights(store: ObjectStore) -> StoredWeights:
    return StoredWeights(store, "test", clock=ManualClock(), part_bytes=100)


def _publish(store: ObjectStore, version: int) -> None:
    _weights(store).publish(version, weights_of(version))


def _latest_weights(store: ObjectStore) -> object:
    weights = _weights(store)
    manifest = weights.latest()
    assert manifest is not None
    arrays = weights.fetch(manifest.version)
    return manifest.version, {name: array.tobytes() for name, array in arrays.items()}


def _commit(store: ObjectStore, *indices: int) -> None:
    write_shard(store, [make_group(i) for i in indices], recipe_digest=RECIPE, now=1.0)


def _shards(store: ObjectStore) -> object:
    manifests = ShardIndex(store).poll()
    for manifest in manifests:
        verify_shard(store, manifest)
    return [(m, [to_json(g) for g in read_shard(store, m)]) for m in manifests]


def _claim(store: ObjectStore, step: int) -> None:
    """Claim a step for whatever waits, as the trainer's feed does."""
    index = GroupIndex(store)
    index.refresh()
    if index.last_step >= step:
        return
    waiting = sorted(index.waiting.items(), key=lambda item: item[1].entry.admission_index)
    entry = LedgerEntry(
        step=step,
        groups=tuple((name, copy.manifest.data_digest) for name, copy in waiting[:2]),
        lag_max=0,
        incarnation="one",
        settings_digest="settings",
        created_at=1.0,
    )
    assert ledger.append(store, entry)


def _steps(store: ObjectStore) -> object:
    account = audit(store)
    assert not account.twice
    return ledger.entries_after(store, 0), account.trained, account.waiting


def _four_shards_and_a_step(store: ObjectStore) -> None:
    for index in range(4):
        _commit(store, index)
    _claim(store, 1)


WRITERS = {
    "publish": Writer(
        before=lambda store: _publish(store, 1),
        write=lambda store: _publish(store, 2),
        then=lambda store: _publish(store, 3),
        seen=_latest_weights,
    ),
    "first publish": Writer(
        before=lambda store: None,
        write=lambda store: _publish(store, 0),
        then=lambda store: _publish(store, 1),
        seen=lambda store: _weights(store).latest() and _latest_weights(store),
    ),
    "shard": Writer(
        before=lambda store: _commit(store, 0, 1),
        write=lambda store: _commit(store, 2, 3),
        then=lambda store: _commit(store, 4),
        seen=_shards,
    ),
    "step": Writer(
        before=_four_shards_and_a_step,
        write=lambda store: _claim(store, 2),
        then=lambda store: _claim(store, 3),
        seen=_steps,
    ),
}


def write_and_die(name: str, folder: str, number: int, moment: Moment) -> None:
    """In a child: begin the commit; the process ends before it is through."""
    if moment is Moment.FILE:
        watch_files(folder, number)
        WRITERS[name].write(LocalStore(folder))
    else:
        WRITERS[name].write(DyingStore(LocalStore(folder), number, moment))
    os._exit(0)


def dry_run(name: str, folder: str) -> list[str]:
    """The store calls of an undisturbed commit."""
    WRITERS[name].before(LocalStore(folder))
    store = DyingStore(LocalStore(folder))
    WRITERS[name].write(store)
    return store.calls


def files_below(folder: Path) -> dict[str, bytes]:
    """Every file, temporary ones too, but not the lock of the local store."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }
