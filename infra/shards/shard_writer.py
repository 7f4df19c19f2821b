"""Commit groups: data first, manifest last. Every write may happen twice without harm.

The data file is named by the SHA-256 of its *content without timings* (``content_digest``), so a
retried write of the same groups finds its first attempt even though the seconds differ; the file
that was there first stays. Size and crc32c in the manifest are those of the file's bytes.
"""

from __future__ import annotations

import io
from collections.abc import Iterable

import google_crc32c
import pyarrow as pa
import pyarrow.parquet as pq

from infra.contracts.errors import SchemaMismatch
from infra.contracts.json_codec import to_marker
from infra.contracts.manifests import ShardManifest
from infra.contracts.records import Group
from infra.contracts.rollout_codec import content_digest, encode_groups
from infra.shards.group_summary import capabilities, check_group, summarise
from infra.shards.manifest_reader import decode_manifest
from infra.shards.quarantine import quarantine
from infra.storage import run_layout
from infra.storage.object_store import ObjectStore


def write_shard(
    store: ObjectStore, groups: Iterable[Group], *, recipe_digest: str, now: float
) -> ShardManifest:
    """Commit whole groups of one decision, block and run as one shard.

    Args:
        store: The run.
        groups: In any order; a shard holds them by admission index.
        recipe_digest: The recipe that judged and decided them.
        now: Unix seconds, for ``created_at`` only.

    Returns:
        The committed manifest: an earlier attempt's, if there was one.

    Raises:
        SchemaMismatch: the groups must not be committed together, or at all; says which and why.
            Nothing was written.
        DamagedObject: an earlier attempt left a damaged data file or manifest (quarantined).
        StorageError: the store failed; what was written is harmless and found again by a retry.
    """
    groups = tuple(sorted(groups, key=lambda group: group.admission_index))
    _check(groups, recipe_digest)
    table = encode_groups(groups)
    digest = content_digest(table).hex()
    decision, block = groups[0].decision, run_layout.block_of(groups[0].admission_index)
    assert decision is not None, "checked above"
    manifest_key = run_layout.shard_manifest(decision, block, digest)
    data_key = run_layout.shard_data(decision, block, digest)

    data = _parquet(table)
    if not store.create(data_key, data):
        data = _first_attempt(store, data_key, digest)
    entries = tuple(map(summarise, groups))
    manifest = ShardManifest(
        run=groups[0].run,
        decision=decision,
        block=block,
        data_key=data_key,
        data_digest=digest,
        size_bytes=len(data),
        crc32c=google_crc32c.value(data),
        rows=table.num_rows,
        groups=entries,
        recipe_digest=recipe_digest,
        capabilities=capabilities(groups),
        oldest_version=min(entry.oldest_version for entry in entries),
        newest_version=max(entry.newest_version for entry in entries),
        created_at=now,
    )
    if store.create(manifest_key, to_marker(manifest)):
        return manifest
    return decode_manifest(store, manifest_key, store.read(manifest_key))


def _parquet(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    # Shards are small: 12 groups of 8 rollouts take 2.3 ms and 14 kB, with pyarrow's defaults
    # (dictionaries, statistics, a copy of the Arrow schema) 5.9 ms and 26 kB.
    with pq.ParquetWriter(
        sink,
        table.schema,
        compression="zstd",
        use_dictionary=False,
        write_statistics=False,
        store_schema=False,
    ) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata(table.schema.metadata)
    return sink.getvalue()


def _first_attempt(store: ObjectStore, key: str, digest: str) -> bytes:
    """The bytes an earlier or racing attempt left; only its timings may differ from ours."""
    data = store.read(key)
    try:
        content = content_digest(pq.ParquetFile(pa.BufferReader(data)).read()).hex()
    except (pa.ArrowException, OSError) as e:
        raise quarantine(store, key, f"an earlier attempt's file is not readable: {e}") from e
    if content != digest:
        raise quarantine(store, key, "an earlier attempt's file has other content than its name")
    return data


def _check(groups: tuple[Group, ...], recipe_digest: str) -> None:
    if not groups:
        raise SchemaMismatch("a shard needs at least one group")
    for name, values in (
        ("decision", {group.decision for group in groups}),
        ("block", {run_layout.block_of(group.admission_index) for group in groups}),
        ("run", {group.run for group in groups}),
    ):
        if len(values) > 1:
            raise SchemaMismatch(
                f"a shard holds groups of one {name}; got {', '.join(sorted(map(str, values)))}; "
                "write one shard for each"
            )
    if len({group.group_id for group in groups}) < len(groups):
        raise SchemaMismatch("a group appears twice in one shard; keep one copy")
    problems = [problem for group in groups for problem in check_group(group, recipe_digest)]
    if problems:
        rest = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise SchemaMismatch("; ".join(problems[:3]) + rest)
