"""WriteShards: decided groups to committed shards, one per decision and block, then a wake-up hint.

On one machine a bundle's groups are committed together when it ends. On a distributed runner
``batch_groups`` puts ``GroupIntoBatches`` and a ``Reshuffle`` (the stable point) in front. Writing
twice does no harm: shards are named by content, and readers know the twice-committed rules.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

import apache_beam as beam
from apache_beam.metrics import Metrics
from apache_beam.pvalue import PCollection
from apache_beam.transforms.window import GlobalWindows, WindowedValue

from infra.contracts.manifests import ShardManifest
from infra.contracts.records import Group
from infra.shards.shard_writer import write_shard
from infra.storage.run_layout import block_of
from transforms import coders  # noqa: F401 (registers them)
from transforms.parts import HINTED_ROLES, Parts, StageSettings, parts_of


def commit(groups: Iterable[Group], parts: Parts, limit: int) -> list[ShardManifest]:
    """Commit groups as shards of at most ``limit`` and wake who follows them.

    A group that comes twice (a re-issued message beside its first) is committed once; which copy is
    free, as both are the same admission.
    """
    batches: dict[tuple, dict[str, Group]] = defaultdict(dict)
    for group in groups:
        batches[group.decision, block_of(group.admission_index)].setdefault(group.group_id, group)
    manifests = []
    for batch in batches.values():
        items = list(batch.values())
        for start in range(0, len(items), limit):
            began = parts.clock.now()
            manifest = write_shard(
                parts.store,
                items[start : start + limit],
                recipe_digest=parts.recipe.digest,
                now=began,
            )
            manifests.append(manifest)
            parts.metrics.observe(
                {
                    "pipeline/write/shard_secs": parts.clock.now() - began,
                    "pipeline/write/shard_groups": len(manifest.groups),
                    "pipeline/write/shard_bytes": manifest.size_bytes,
                }
            )
    parts.waiting_for = "controller"
    if manifests:
        for role in HINTED_ROLES:
            parts.hint(role, event="shards", count=len(manifests))
    return manifests


class _WriteBundle(beam.DoFn):
    shards = Metrics.counter("headrace", "shards_written")

    def __init__(self, settings: StageSettings) -> None:
        self._settings = settings

    def start_bundle(self) -> None:
        self._groups: list[Group] = []
        self._manifests: list[ShardManifest] = []

    def process(self, group: Group) -> None:
        self._groups.append(group)
        if len(self._groups) >= self._settings.flush_groups:
            self._flush()

    def finish_bundle(self) -> Iterator[WindowedValue]:
        self._flush()
        yield from map(GlobalWindows.windowed_value, self._manifests)

    def _flush(self) -> None:
        groups, self._groups = self._groups, []
        written = commit(groups, parts_of(self._settings), self._settings.flush_groups)
        self.shards.inc(len(written))
        self._manifests += written


class _WriteBatch(beam.DoFn):
    shards = Metrics.counter("headrace", "shards_written")

    def __init__(self, settings: StageSettings) -> None:
        self._settings = settings

    def process(self, batch: tuple[str, Iterable[Group]]) -> Iterator[ShardManifest]:
        written = commit(batch[1], parts_of(self._settings), self._settings.flush_groups)
        self.shards.inc(len(written))
        yield from written


def shard_key(group: Group) -> str:
    """Groups with the same key may lie in one shard."""
    return f"{group.decision}/{block_of(group.admission_index):08d}"


class WriteShards(beam.PTransform):
    """Commit groups; emits the manifests.

    Args:
        settings: Where to, and the most groups of a shard.
        batch_groups: 0: commit at the end of each bundle. Above: gather so many groups across
            bundles and workers first, waiting at most ``max_wait_secs``.
    """

    def __init__(
        self, settings: StageSettings, *, batch_groups: int = 0, max_wait_secs: float = 1.0
    ) -> None:
        super().__init__()
        self._settings = settings
        self._batch_groups, self._max_wait_secs = batch_groups, max_wait_secs

    def expand(self, groups: PCollection[Group]) -> PCollection[ShardManifest]:
        if not self._batch_groups:
            writer = beam.ParDo(_WriteBundle(self._settings)).with_output_types(ShardManifest)
            return groups | "Write" >> writer
        batches = beam.GroupIntoBatches(
            self._batch_groups, max_buffering_duration_secs=self._max_wait_secs
        )
        return (
            groups
            | "KeyByFolder" >> beam.WithKeys(shard_key).with_output_types(tuple[str, Group])
            | "Batch" >> batches
            | "Stable" >> beam.Reshuffle()
            | "Write" >> beam.ParDo(_WriteBatch(self._settings)).with_output_types(ShardManifest)
        )
