"""Golden files: what version 1 wrote is read for ever, and version 1 still writes the same.

``tests/golden/`` holds one file per stored or sent record. After a deliberate change of the format
(a new schema version), add new files with ``python -m tests.golden_records`` and keep the old.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from infra.contracts.json_codec import from_json, to_json
from infra.contracts.manifests import ShardManifest, WeightManifest
from infra.contracts.records import GenerateRequest
from infra.contracts.rollout_codec import content_digest, decode_groups, encode_groups
from infra.shards.shard_reader import read_shard
from infra.shards.shard_writer import write_shard
from infra.storage.memory_store import MemoryStore
from tests.golden_records import (
    BEFORE_SAMPLING_OPTIONS,
    FOLDER,
    GENERATE_REQUEST,
    GROUPS,
    GROUPS_2,
    RECIPE,
    RECORDS,
    WEIGHT_MANIFEST_1,
)


def golden(name: str) -> bytes:
    return Path(FOLDER, name).read_bytes()


@pytest.mark.parametrize("name", RECORDS)
def test_old_bytes_decode_and_new_encode_equal(name: str) -> None:
    record, data = RECORDS[name], golden(f"{name}.json")
    assert to_json(record) == data
    assert to_json(from_json(type(record), data)) == data


@pytest.mark.parametrize("name", BEFORE_SAMPLING_OPTIONS)
def test_bytes_from_before_sampling_options_decode(name: str) -> None:
    record = RECORDS[name]
    old = from_json(type(record), golden(name.removesuffix("_v2") + ".json"))
    assert to_json(old) == to_json(record)


def test_a_shard_with_sampling_options_is_version_2_and_one_without_is_not() -> None:
    table = pq.read_table(pa.BufferReader(golden("shard-v2.parquet")))
    assert list(map(to_json, decode_groups(table))) == list(map(to_json, GROUPS_2))
    assert content_digest(encode_groups(GROUPS_2)) == content_digest(table)
    assert table.column("sampling_options").to_pylist()[0] == "{}"
    versions = [
        t.schema.metadata[b"headrace.schema_version"]
        for t in map(encode_groups, (GROUPS_2, GROUPS))
    ]
    assert versions == [b"2", b"1"]


def test_a_weight_manifest_of_schema_1_decodes() -> None:
    assert from_json(WeightManifest, golden("weight_manifest.json")) == WEIGHT_MANIFEST_1


def test_a_request_from_before_segments_decodes() -> None:
    assert from_json(GenerateRequest, golden("generate_request.json")) == GENERATE_REQUEST


def test_an_old_shard_decodes_and_its_content_digest_is_the_same() -> None:
    table = pq.read_table(pa.BufferReader(golden("shard-v1.parquet")))
    assert list(map(to_json, decode_groups(table))) == list(map(to_json, GROUPS))
    manifest = from_json(ShardManifest, golden("shard_manifest.json"))
    assert content_digest(table).hex() == manifest.data_digest
    assert content_digest(encode_groups(GROUPS)).hex() == manifest.data_digest


def test_an_old_shard_is_read_through_its_manifest_and_a_retry_finds_it() -> None:
    store = MemoryStore()
    manifest = from_json(ShardManifest, golden("shard_manifest.json"))
    store.create(manifest.data_key, golden("shard-v1.parquet"))
    assert list(map(to_json, read_shard(store, manifest))) == list(map(to_json, GROUPS))
    assert write_shard(store, GROUPS, recipe_digest=RECIPE, now=manifest.created_at) == manifest


def test_the_columns_are_those_of_version_1() -> None:
    schema = pq.read_schema(pa.BufferReader(golden("shard-v1.parquet")))
    columns = "".join(f"{field.name}: {field.type}\n" for field in encode_groups(()).schema)
    assert columns.encode() == golden("schema-v1.txt")
    assert schema.names == encode_groups(()).schema.names
