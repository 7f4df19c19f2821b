"""``headrace branch RUN@VERSION NEW``: a new run whose version 0 is a version of an old one."""

from __future__ import annotations

import argparse
import json
import shlex

from infra.clock import SystemClock
from infra.config import to_toml
from infra.contracts.errors import ConfigError
from infra.storage import run_layout
from infra.storage.folder_copy import upload_folder
from infra.storage.open_run import open_run
from infra.storage.open_store import open_store
from infra.weights.command import split_version
from infra.weights.export import export_model
from infra.weights.leases import leased
from infra.weights.stored_weights import StoredWeights
from pipelines.launcher.role_commands import RoleCommands


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="headrace branch", description=__doc__)
    parser.add_argument("parent", metavar="RUN[@VERSION]", help="default: the newest version")
    parser.add_argument(
        "folder", metavar="NEW", help="where the new run will lie; nothing may be there"
    )
    parser.add_argument(
        "--set",
        metavar="section.key=value",
        action="append",
        default=[],
        help="change a key of the parent's configuration; may be repeated",
    )
    args = parser.parse_args(argv)
    version = branch(args.parent, args.folder, args.set)
    print(f"{args.folder}: starts from version {version} of {split_version(args.parent)[0]}; next:")
    print(f"  headrace run {shlex.quote(args.folder)}")
    return 0


def branch(
    parent: str, location: str, overrides: list[str], commands: RoleCommands | None = None
) -> int:
    """Create the new run's folder; return the version it starts from.

    Order: model, lineage, the model's marker, ``run.toml``: only the last makes it a run.

    Raises:
        ConfigError: no such run or version, a folder that holds something, or a bad override.
        DamagedObject: the version's weights fail their checksums.
    """
    from pipelines.launcher.run_plan import plan_run

    origin, asked = split_version(parent)
    store = open_run(origin)
    weights = StoredWeights(store, "")
    latest = weights.latest()
    versions = weights.versions()
    if latest is None or (asked is not None and asked not in versions):
        there = ", ".join(map(str, versions)) or "none"
        raise ConfigError(f"{parent}: no such version; published and kept: {there}")
    new = open_store(location)
    if new.list_after("", limit=1):
        raise ConfigError(f"{location}: it is not empty; give the location of a new run")
    manifest = latest if asked is None else weights.manifest(asked)
    name = json.dumps(new.url.rstrip("/").rpartition("/")[2])
    plan = plan_run(origin, location, [f"run.name={name}", *overrides], commands or RoleCommands())
    with leased(store, weights, manifest.version, SystemClock(), who="branch"):
        weights.fetch(manifest.version)  # every byte is verified before it is copied
        export_model(store, manifest, plan.folder / run_layout.INIT_MODEL)
    if plan.remote:
        upload_folder(new, run_layout.INIT_MODEL, plan.folder / run_layout.INIT_MODEL)
    lineage = {
        "parent": origin,
        "parent_run": manifest.run,
        "version": manifest.version,
        "digest": manifest.digest,
    }
    text = json.dumps(lineage, indent=2, sort_keys=True).encode()
    new.create(run_layout.LINEAGE, text)
    new.create(run_layout.INIT_DONE, json.dumps({"by": "branch"}).encode())
    new.create(run_layout.RUN_CONFIG, to_toml(plan.tree).encode())
    return manifest.version
