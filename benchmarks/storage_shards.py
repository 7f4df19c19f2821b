"""Shards: what following 100 to 100,000 of them costs, and rows per second against plain Parquet.

The many shards are markers only, in a folder that lies in memory where the system has one: a run is
followed without opening a data file, and markers just written are in the page cache anyhow.
"""

from __future__ import annotations

import gc
import io
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.shard_records import RECIPE, make_group
from infra.contracts import ids
from infra.contracts.json_codec import to_marker
from infra.contracts.manifests import GroupEntry, LedgerEntry, ShardManifest
from infra.contracts.records import Decision, Group
from infra.contracts.rollout_codec import encode_groups
from infra.ledger.group_index import GroupIndex
from infra.shards.shard_reader import read_shard
from infra.shards.shard_writer import write_shard
from infra.storage import run_layout
from infra.storage.local_store import LocalStore
from infra.storage.object_store import ObjectStore

GROUPS_PER_SHARD = 4
GROUPS_PER_STEP = 64


class CountedStore:
    """Passes every call on and counts it by name."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> object:
        member = getattr(self._store, name)
        if not callable(member):
            return member

        def counted(*args: object, **options: object) -> object:
            self.calls[name] += 1
            return member(*args, **options)

        return counted


def measure_poll(counts: Iterable[int], repeats: int = 21) -> dict[str, dict[str, float]]:
    """Follow runs of so many shards, all but the last few consumed by steps.

    Returns:
        By number of shards: ``startup_secs`` (first refresh), ``idle_poll_ms``,
        ``new_shard_poll_ms``, the storage calls of one idle poll, and the index's size.
    """
    results = {}
    for count in counts:
        with _folder(in_memory=True) as folder:
            _write_markers(folder, count)
            results[str(count)] = _follow(LocalStore(folder), count, repeats)
    return results


def _follow(local: LocalStore, count: int, repeats: int) -> dict[str, float]:
    store = CountedStore(local)
    index = GroupIndex(store)  # type: ignore[arg-type]
    gc.collect()
    before, started = _resident_bytes(), time.perf_counter()
    index.refresh()
    startup_secs = time.perf_counter() - started
    result: dict[str, float] = {
        "startup_secs": round(startup_secs, 3),
        "index_bytes_per_shard": round((_resident_bytes() - before) / count),
    }
    idle = [_ms(index.refresh) for _ in range(repeats)]
    store.calls.clear()
    index.refresh()
    result["idle_poll_ms"] = round(statistics.median(idle), 3)
    result |= {f"idle_{name}_calls": number for name, number in sorted(store.calls.items())}
    fresh = []
    for number in range(count, count + repeats):
        _write_shard_marker(local, number)
        fresh.append(_ms(index.refresh))
    assert len(index.waiting) >= repeats * GROUPS_PER_SHARD
    result["new_shard_poll_ms"] = round(statistics.median(fresh), 3)
    return result


def measure_rows(
    groups: int = 32, n: int = 8, tokens: int = 256, repeats: int = 9
) -> dict[str, float]:
    """Commit and read shards of ``groups`` groups, against plain Parquet of the same table.

    Plain means pyarrow's own write (zstd) and a synced file, and its own read into a table: no
    checks, no summaries, no records.
    """
    secs: dict[str, list[float]] = {"write": [], "plain_write": [], "read": [], "plain_read": []}
    with _folder() as folder:
        store = LocalStore(folder)
        for repeat in range(repeats + 1):  # the first one warms up
            records = [make_group(repeat * groups + i, n, tokens) for i in range(groups)]
            table, plain = encode_groups(records), folder / f"plain-{repeat}.parquet"

            started = time.perf_counter()
            shards = _commit(store, records)
            secs["write"].append(time.perf_counter() - started)
            secs["plain_write"].append(_ms(lambda t=table, p=plain: _plain_write(t, p)) / 1e3)
            secs["plain_read"].append(_ms(lambda p=plain: pq.read_table(p)) / 1e3)
            started = time.perf_counter()
            read = [group for shard in shards for group in read_shard(store, shard)]
            secs["read"].append(time.perf_counter() - started)
            assert len(read) == groups
    medians = {name: statistics.median(values[1:]) for name, values in secs.items()}
    rates = {f"{name}_rows_per_sec": round(groups * n / value) for name, value in medians.items()}
    return rates | {
        "write_over_plain": round(medians["write"] / medians["plain_write"], 3),
        "read_over_plain": round(medians["read"] / medians["plain_read"], 3),
    }


def _commit(store: ObjectStore, records: list[Group]) -> list[ShardManifest]:
    """One shard for each block."""
    blocks: dict[int, list[Group]] = {}
    for group in records:
        blocks.setdefault(run_layout.block_of(group.admission_index), []).append(group)
    return [write_shard(store, g, recipe_digest=RECIPE, now=0.0) for g in blocks.values()]


def _plain_write(table: pa.Table, path: Path) -> None:
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd")
    with path.open("wb") as file:
        file.write(sink.getbuffer())
        file.flush()
        os.fsync(file.fileno())


def _write_markers(folder: Path, shards: int) -> None:
    """Shards of four accepted groups; steps consumed all but the newest 128 groups."""
    store = LocalStore(folder)
    digests = [_write_shard_marker(store, number) for number in range(shards)]
    consumed = max(shards * GROUPS_PER_SHARD - 2 * GROUPS_PER_STEP, 0) // GROUPS_PER_STEP
    for step in range(1, consumed + 1):
        indices = range((step - 1) * GROUPS_PER_STEP, step * GROUPS_PER_STEP)
        entry = LedgerEntry(
            step=step,
            groups=tuple((_group_id(i), digests[i // GROUPS_PER_SHARD]) for i in indices),
            lag_max=0,
            incarnation="bench",
            settings_digest="settings",
            created_at=0.0,
        )
        _put(store, run_layout.ledger_step(step), to_marker(entry))


def _write_shard_marker(store: LocalStore, number: int) -> str:
    first = number * GROUPS_PER_SHARD
    digest = ids.content_id("bench", number) * 2
    block = run_layout.block_of(first)
    entries = tuple(
        GroupEntry(
            group_id=_group_id(i),
            admission_index=i,
            prompt_id=ids.content_id("prompt", i),
            rollouts=8,
            oldest_version=0,
            newest_version=0,
            reward_mean=0.625,
            pass_rate=0.625,
            tokens=800,
        )
        for i in range(first, first + GROUPS_PER_SHARD)
    )
    manifest = ShardManifest(
        run="bench",
        decision=Decision.ACCEPTED,
        block=block,
        data_key=run_layout.shard_data(Decision.ACCEPTED, block, digest),
        data_digest=digest,
        size_bytes=14_000,
        crc32c=number,
        rows=32,
        groups=entries,
        recipe_digest=RECIPE,
        capabilities=("scorable", "trainable"),
        oldest_version=0,
        newest_version=0,
        created_at=1.7e9,
    )
    _put(store, manifest.data_key, b"")
    _put(store, run_layout.shard_manifest(Decision.ACCEPTED, block, digest), to_marker(manifest))
    return digest


def _put(store: LocalStore, key: str, data: bytes) -> None:
    path = Path(store.url, key)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def _group_id(index: int) -> str:
    return ids.content_id("group", "bench", index)


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _ms(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) * 1e3


@contextmanager
def _folder(*, in_memory: bool = False) -> Iterator[Path]:
    memory = "/dev/shm" if in_memory and os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(prefix="headrace-bench-", dir=memory) as name:
        yield Path(name)
