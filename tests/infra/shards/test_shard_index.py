"""The shard index: every manifest once, closed blocks left alone, no error loses anything."""

from __future__ import annotations

from dataclasses import replace

import pytest

from infra.contracts.errors import DamagedObject, NewerSchema, StorageError
from infra.contracts.json_codec import from_json, to_json, to_marker
from infra.contracts.records import Decision
from infra.shards.quarantine import quarantined
from infra.shards.shard_index import ShardCursor, ShardIndex, committed_after
from infra.storage import run_layout
from infra.storage.memory_store import MemoryStore
from infra.storage.read_many import read_many
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


def test_a_stored_cursor_goes_on_and_late_shards_in_old_blocks_come_once() -> None:
    store = MemoryStore()
    first = [write(store, make_group(index)) for index in (0, 1024, 5000)]
    found, cursor = committed_after(store)
    assert found == tuple(first)
    late = write(store, make_group(3))
    for _ in range(2):  # a job that died before it stored the new cursor begins again
        again = from_json(ShardCursor, to_marker(cursor))
        found, after = committed_after(store, again)
        assert found == (late,)
    assert committed_after(store, after) == ((), after)


def test_a_cursor_remembers_each_decision_for_itself() -> None:
    store = MemoryStore()
    accepted, rejected = (
        write(store, make_group(0)),
        write(store, make_group(1, decision=Decision.REJECTED)),
    )
    found, cursor = committed_after(store, decisions=(Decision.ACCEPTED,))
    assert found == (accepted,)
    assert committed_after(store, cursor)[0] == (rejected,)


def test_a_cursor_forgets_closed_blocks() -> None:
    store = MemoryStore()
    write(store, make_group(0))
    index = ShardIndex(store)
    index.poll()
    index.close_blocks_below(1)
    assert index.cursor() == ShardCursor(closed_below=1)
    write(store, make_group(1))
    assert committed_after(store, index.cursor())[0] == ()


def test_following_costs_the_same_calls_however_many_blocks_are_closed() -> None:
    calls = set()
    for blocks in (1, 20):
        store = CountingStore()
        index = ShardIndex(store)
        for block in range(blocks):
            write(store, make_group(block * 1024))
        index.poll()
        index.close_blocks_below(blocks)
        store.asked.clear()
        assert index.poll() == ()
        calls.add(len(store.asked))
    assert len(calls) == 1


def test_many_manifests_are_read_at_once_and_none_is_lost() -> None:
    store = CountingStore()
    written = {write(store, make_group(index)).data_digest for index in range(200)}
    assert {manifest.data_digest for manifest in ShardIndex(store).poll()} == written
    assert list(read_many(store, [])) == []
    with pytest.raises(KeyError):
        list(read_many(store, ["rollouts/a", "rollouts/b"]))


def test_a_flipped_digit_of_a_manifest_is_seen() -> None:
    store = MemoryStore()
    manifest = write(store, make_group(0))
    key = run_layout.shard_manifest(manifest.decision, 0, manifest.data_digest)
    overwrite(store, key, store.read(key).replace(b'"tokens":6', b'"tokens":7'))
    assert ShardIndex(store).poll() == () and quarantined(store) == [key]
    with pytest.raises(DamagedObject, match="does not match its seal"):
        write(store, make_group(0))
