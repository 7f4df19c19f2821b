"""The shard reader: what is written is read; nothing damaged is ever used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings

from infra.contracts.errors import DamagedObject
from infra.contracts.records import Decision, Group
from infra.shards.quarantine import quarantined
from infra.shards.shard_index import ShardIndex
from infra.shards.shard_reader import read_shard, verify_shard
from infra.storage.local_store import LocalStore
from infra.storage.memory_store import MemoryStore
from tests.builders import make_group
from tests.infra.shards.stores import encoded, overwrite, write
from tests.record_strategies import groups


@pytest.mark.parametrize("kind", [MemoryStore, LocalStore])
@pytest.mark.parametrize("decision", Decision)
def test_what_is_written_is_read(kind: type, decision: Decision, tmp_path: Path) -> None:
    store = kind(tmp_path) if kind is LocalStore else kind()
    records = [make_group(i, decision=decision) for i in (3, 1, 2)]
    manifest = write(store, *records)
    assert ShardIndex(store).poll() == (manifest,)
    in_order = sorted(records, key=lambda group: group.admission_index)
    assert encoded(read_shard(store, manifest)) == encoded(in_order)
    verify_shard(store, manifest)


@settings(max_examples=15, deadline=None)
@given(groups(finite=True))
def test_every_valid_group_can_be_committed(group: Group) -> None:
    if group.decision is None:
        group = replace(group, decision=Decision.FAILED)
    store = MemoryStore()
    manifest = write(store, group)
    verify_shard(store, manifest)
    assert encoded(read_shard(store, manifest)) == encoded([group])


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: flipped(data, 100), "crc32c differs"),
        (lambda data: flipped(data, len(data) - 1), "crc32c differs"),
        (lambda data: data[:-1], "bytes, the manifest says"),
        (lambda data: b"", "0 bytes, the manifest says"),
    ],
)
def test_a_damaged_shard_is_quarantined_and_the_others_are_read(
    damage: Callable[[bytes], bytes], message: str
) -> None:
    store = MemoryStore()
    bad, good = write(store, make_group(0)), write(store, make_group(1))
    overwrite(store, bad.data_key, damage(store.read(bad.data_key)))
    with pytest.raises(DamagedObject, match=message):
        read_shard(store, bad)
    with pytest.raises(DamagedObject, match=message):
        read_shard(store, bad)
    assert quarantined(store) == [bad.data_key]
    assert encoded(read_shard(store, good)) == encoded([make_group(1)])


def test_a_missing_data_file_is_damage() -> None:
    store = MemoryStore()
    manifest = write(store, make_group())
    store.delete(manifest.data_key)
    with pytest.raises(DamagedObject, match="the data file is gone"):
        read_shard(store, manifest)


def test_a_manifest_that_tells_of_other_groups_is_found_out() -> None:
    store = MemoryStore()
    manifest = write(store, make_group())
    (entry,) = manifest.groups
    changed = replace(manifest, groups=(replace(entry, reward_mean=0.25),))
    with pytest.raises(DamagedObject, match="not those that the manifest lists"):
        read_shard(store, changed)


def test_verification_finds_content_under_a_wrong_name() -> None:
    store = MemoryStore()
    manifest = write(store, make_group())
    with pytest.raises(DamagedObject, match="does not have the digest"):
        verify_shard(store, replace(manifest, data_digest="0" * 64))
