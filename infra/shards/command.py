"""``headrace shards RUN``: list, read and verify the committed shards of a run."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence

from infra.contracts.errors import ConfigError, DamagedObject
from infra.contracts.json_codec import to_json
from infra.contracts.manifests import ShardManifest
from infra.contracts.records import Decision, Group
from infra.contracts.rollout_codec import encode_groups
from infra.shards.quarantine import quarantined
from infra.shards.shard_index import ShardIndex
from infra.shards.shard_reader import read_shard, verify_shard
from infra.shards.shard_text import group_text, manifest_table
from infra.storage.object_store import ObjectStore
from infra.storage.open_run import open_run

_EXAMPLES = """examples:
  headrace shards runs/demo --decision rejects      list the rejected groups' shards
  headrace shards runs/demo show 3fa8               rollouts of a group, or one rollout, by id
  headrace shards runs/demo verify                  read every byte against its checksums"""


def main(argv: list[str]) -> int:
    """List shards (default) and what is quarantined, ``show ID``, or ``verify``."""
    parser = argparse.ArgumentParser(
        prog="headrace shards",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", metavar="RUN", help="the run's folder")
    parser.add_argument("action", nargs="?", choices=("list", "show", "verify"), default="list")
    parser.add_argument("id", nargs="?", default="", help="for show: how an id begins")
    parser.add_argument("--json", action="store_true", help="JSON instead of text")
    parser.add_argument("--decision", choices=[d.value for d in Decision], help="only these")
    args = parser.parse_args(argv)
    if (args.action == "show") != bool(args.id):
        parser.error("show needs the beginning of a group or rollout id; list and verify need none")

    store = open_run(args.run)
    decisions = (Decision(args.decision),) if args.decision else tuple(Decision)
    manifests = ShardIndex(store, decisions).poll()
    if args.action == "show":
        return _show(store, manifests, args.id, args.json)
    if args.action == "verify":
        return _verify(store, manifests, args.json)
    damaged = quarantined(store)
    if args.json:
        shards = [json.loads(to_json(manifest)) for manifest in manifests]
        print(json.dumps({"shards": shards, "quarantined": damaged}))
    else:
        print("\n".join([manifest_table(manifests), *(f"quarantined  {key}" for key in damaged)]))
    return 0


def _show(
    store: ObjectStore, manifests: Sequence[ShardManifest], prefix: str, as_json: bool
) -> int:
    groups = list(_groups_named(store, manifests, prefix))
    rollout = "" if groups else prefix
    groups = groups or list(_groups_with_rollout(store, manifests, prefix))
    if not groups:
        raise ConfigError(f"no group and no rollout has an id that begins with '{prefix}'")
    if as_json:
        rows = encode_groups(groups).to_pylist(maps_as_pydicts="strict")
        print(json.dumps([row for row in rows if (row["rollout_id"] or "").startswith(rollout)]))
    else:
        print("\n\n".join(group_text(group, rollout) for group in groups))
    return 0


def _groups_named(
    store: ObjectStore, manifests: Sequence[ShardManifest], prefix: str
) -> Iterator[Group]:
    for manifest in manifests:
        if any(entry.group_id.startswith(prefix) for entry in manifest.groups):
            yield from (g for g in read_shard(store, manifest) if g.group_id.startswith(prefix))


def _groups_with_rollout(
    store: ObjectStore, manifests: Sequence[ShardManifest], prefix: str
) -> Iterator[Group]:
    for manifest in manifests:
        try:
            groups = read_shard(store, manifest)
        except DamagedObject as e:
            print(f"headrace shards: skipped: {e}", file=sys.stderr)
            continue
        for group in groups:
            if any(rollout.rollout_id.startswith(prefix) for rollout in group.rollouts):
                yield group


def _verify(store: ObjectStore, manifests: Sequence[ShardManifest], as_json: bool) -> int:
    """Verify every shard. 1 if any is damaged, now or by an earlier reader's finding."""
    problems = []
    for manifest in manifests:
        try:
            verify_shard(store, manifest)
        except DamagedObject as e:
            problems.append(str(e))
    marked = quarantined(store)
    if as_json:
        print(json.dumps({"shards": len(manifests), "damaged": problems, "quarantined": marked}))
    else:
        for problem in problems:
            print(problem)
        print(f"{len(manifests)} shards read, {len(problems)} damaged, {len(marked)} quarantined")
    return 1 if problems or marked else 0
