"""Read a shard's marker: sealed, of this schema or an older one, and about the shard it names."""

from __future__ import annotations

from infra.contracts.errors import NewerSchema, SchemaMismatch
from infra.contracts.json_codec import from_json
from infra.contracts.manifests import ShardManifest
from infra.shards.quarantine import quarantine
from infra.storage import run_layout
from infra.storage.object_store import ObjectStore


def decode_manifest(store: ObjectStore, key: str, data: bytes) -> ShardManifest:
    """Return the manifest that was read from ``key``.

    Raises:
        DamagedObject: it is damaged, or describes another shard; it is quarantined.
        NewerSchema: written by a newer program; intact.
    """
    try:
        manifest = from_json(ShardManifest, data, name=f"{store.url.rstrip('/')}/{key}")
    except NewerSchema:
        raise
    except SchemaMismatch as e:
        raise quarantine(store, key, str(e).removeprefix(f"{store.url.rstrip('/')}/{key}: ")) from e
    expected = run_layout.shard_manifest(manifest.decision, manifest.block, manifest.data_digest)
    if key != expected:
        raise quarantine(store, key, f"it describes another shard, {expected}")
    return manifest
