"""Read a committed shard, every byte checked; a damaged one is quarantined and never half-used."""

from __future__ import annotations

import google_crc32c
import pyarrow as pa
import pyarrow.parquet as pq

from infra.contracts.errors import NewerSchema, SchemaMismatch
from infra.contracts.manifests import ShardManifest
from infra.contracts.records import Group
from infra.contracts.rollout_codec import content_digest, decode_groups, encode_groups
from infra.shards.group_summary import summarise
from infra.shards.quarantine import quarantine
from infra.storage.object_store import ObjectStore


def read_shard(store: ObjectStore, manifest: ShardManifest) -> tuple[Group, ...]:
    """Return the groups of a shard, by admission index.

    Raises:
        DamagedObject: missing, truncated, changed, or not what the manifest says. The object is
            quarantined; a reader that follows a run goes on with the other shards.
        NewerSchema: intact, but written by a newer program.
    """
    key = manifest.data_key
    try:
        data = store.read(key)
    except KeyError:
        raise quarantine(store, key, "its manifest is committed, the data file is gone") from None
    if len(data) != manifest.size_bytes:
        raise quarantine(store, key, f"{len(data)} bytes, the manifest says {manifest.size_bytes}")
    if google_crc32c.value(data) != manifest.crc32c:
        raise quarantine(store, key, "its crc32c differs from the manifest's")
    try:
        # One thread: shards are small, and the cores belong to the trainer and the engine.
        groups = decode_groups(pq.ParquetFile(pa.BufferReader(data)).read(use_threads=False))
    except NewerSchema:
        raise
    except (SchemaMismatch, pa.ArrowException, OSError) as e:
        raise quarantine(store, key, f"not a readable shard: {e}") from e
    if tuple(map(summarise, groups)) != manifest.groups:
        raise quarantine(store, key, "its groups are not those that the manifest lists")
    return groups


def verify_shard(store: ObjectStore, manifest: ShardManifest) -> None:
    """Read a shard and check also that its content has the digest it is named by.

    Raises:
        DamagedObject: as ``read_shard``.
    """
    if content_digest(encode_groups(read_shard(store, manifest))).hex() != manifest.data_digest:
        raise quarantine(store, manifest.data_key, "its content does not have the digest it names")
