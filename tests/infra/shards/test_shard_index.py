"""The shard index: every manifest once, closed blocks left alone, no error loses anything."""

from __future__ import annotations

from dataclasses import replace

import pytest

from infra.contracts.errors import NewerSchema, StorageError
from infra.contracts.json_codec import to_json
from infra.contracts.records import Decision
from infra.shards.quarantine import quarantined
from infra.shards.shard_index import ShardIndex
from infra.storage import run_layout
from infra.storage.memory_store import MemoryStore
from tests.builders import make_group
from tests.infra.shards.stores import CountingStore, overwrite, write


def test_each_manifest_is_read_once() -> None:
    store = CountingStore()
    first = write(store, make_group(0))
    index = ShardIndex(store)
    assert index.poll() == (first,)
    second = write(store, make_group(1), now=2.0)
    store.asked.clear()
    assert index.poll() == (second,)
    assert [key for key in store.asked if key.endswith(".json")] == [
        run_layout.shard_manifest(Decision.ACCEPTED, 0, second.data_digest)
    ]
    assert index.poll() == ()


def test_closed_blocks_are_not_looked_at() -> None:
    store = CountingStore()
    index = ShardIndex(store)
    write(store, make_group(0))
    index.close_blocks_below(1)
    kept = write(store, make_group(1024))
    store.asked.clear()
    assert index.poll() == (kept,)
    assert not any("00000000" in key for key in store.asked)


def test_only_the_wanted_decisions_are_followed() -> None:
    store = MemoryStore()
    write(store, make_group(0))
    rejected = write(store, make_group(1, decision=Decision.REJECTED))
    assert ShardIndex(store, (Decision.REJECTED,)).poll() == (rejected,)


def test_an_error_in_the_middle_of_a_poll_loses_nothing() -> None:
    store = CountingStore()
    manifests = {write(store, make_group(i)).data_digest: i for i in range(3)}
    for digest in manifests:
        index = ShardIndex(store)
        store.broken = run_layout.shard_manifest(Decision.ACCEPTED, 0, digest)
        with pytest.raises(StorageError, match="hiccup"):
            index.poll()
        store.broken = ""
        assert {manifest.data_digest for manifest in index.poll()} == set(manifests)


def test_a_damaged_manifest_is_quarantined_and_the_others_are_found() -> None:
    store = MemoryStore()
    bad, good = write(store, make_group(0)), write(store, make_group(1))
    key = run_layout.shard_manifest(bad.decision, bad.block, bad.data_digest)
    overwrite(store, key, store.read(key)[:-3])
    index = ShardIndex(store)
    assert index.poll() == (good,)
    assert index.poll() == ()
    assert quarantined(store) == [key]


def test_a_manifest_under_another_name_is_quarantined() -> None:
    store = MemoryStore()
    manifest = write(store, make_group(0))
    store.create(run_layout.shard_manifest(Decision.ACCEPTED, 0, "0" * 64), to_json(manifest))
    assert ShardIndex(store).poll() == (manifest,)
    assert len(quarantined(store)) == 1


def test_a_manifest_of_a_newer_program_stops_the_reader() -> None:
    store = MemoryStore()
    manifest = write(store, make_group(0))
    key = run_layout.shard_manifest(Decision.ACCEPTED, 0, "0" * 64)
    store.create(key, to_json(replace(manifest, schema_version=2)))
    with pytest.raises(NewerSchema):
        ShardIndex(store).poll()
    assert quarantined(store) == []
