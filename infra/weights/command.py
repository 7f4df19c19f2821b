"""``headrace weights RUN``: list, show, verify, collect and export the weight versions of a run."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from infra.clock import Clock, SystemClock
from infra.contracts.errors import ConfigError, StorageError
from infra.contracts.manifests import WeightManifest
from infra.storage.object_store import ObjectStore
from infra.storage.open_run import open_run
from infra.weights.collect import collect
from infra.weights.export import export_model
from infra.weights.leases import leased
from infra.weights.show import show
from infra.weights.stored_weights import StoredWeights
from infra.weights.sync_report import report

_EXAMPLES = """examples:
  headrace weights runs/demo                   list the versions
  headrace weights runs/demo show 12           what version 12 holds, and where it comes from
  headrace weights runs/demo verify            read every byte of every version (or: verify 12)
  headrace weights runs/demo sync              from update to first token: median, p90, most
  headrace weights runs/demo gc --dry-run      what would be deleted, and why the rest is kept
  headrace weights runs/demo@12 export DIR     write version 12 as a Hugging Face folder
  headrace weights serve runs/demo             keep the newest versions in memory (serve --help)
"""
_ACTIONS = ("list", "show", "verify", "check", "sync", "gc", "export")


def main(argv: Sequence[str], clock: Clock | None = None) -> int:
    """List, check or export. Raises ``ConfigError`` for what was asked wrongly."""
    if argv[:1] == ["serve"]:
        from infra.weights.flight_command import main as serve

        return serve(argv[1:])
    parser = argparse.ArgumentParser(
        prog="headrace weights",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", metavar="RUN[@VERSION]", help="the run's folder")
    parser.add_argument("action", nargs="?", choices=_ACTIONS, default="list")
    parser.add_argument(
        "what", metavar="V|DIR", nargs="?", help="show, verify: a version; export: folder to write"
    )
    parser.add_argument("--version", type=int, metavar="N", help="only this version")
    parser.add_argument("--dry-run", action="store_true", help="gc: only say what would go")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    args = parser.parse_args(argv)
    location, version = _asked_for(args)
    store = open_run(location)
    weights = StoredWeights(store, "")
    clock = clock or SystemClock()
    if args.action == "gc":
        return collect(store, weights, location, clock.now(), args.dry_run, args.json)
    if args.action == "sync":
        return report(store, location, args.json)
    if args.action in ("verify", "check"):
        return _verify(weights, _versions(weights, location, version), args.json)
    manifests = _manifests(weights, location, version)
    if args.action == "show":
        return show(weights, manifests[-1], clock.now(), args.json)
    if args.action == "export":
        with leased(store, weights, manifests[-1].version, clock, who="export"):
            return _export(store, manifests[-1], Path(args.what), args.json)
    return _list(weights, manifests, clock.now(), args.json)


def _asked_for(args: argparse.Namespace) -> tuple[str, int | None]:
    """The run and the version, from wherever it was given."""
    takes_version = args.action in ("show", "verify", "check")
    if (args.action == "export" and args.what is None) or (
        args.what is not None and args.action in ("list", "gc")
    ):
        text = "give the folder to export to" if args.what is None else f"takes no '{args.what}'"
        raise ConfigError(f"headrace weights {args.run} {args.action}: {text}")
    if args.dry_run and args.action != "gc":
        raise ConfigError(f"headrace weights {args.run} {args.action}: --dry-run is for gc")
    location, version = split_version(args.run)
    given = {version, args.version} - {None}
    if takes_version and args.what is not None:
        if not (args.what.isascii() and args.what.isdigit()):
            raise ConfigError(f"headrace weights {args.action}: {args.what} is no version")
        given.add(int(args.what))
    if len(given) > 1:
        raise ConfigError(f"{args.run} {args.action}: versions {sorted(given)} disagree; give one")
    return location, next(iter(given), None)


def split_version(text: str) -> tuple[str, int | None]:
    """Split ``RUN@12`` into location and version; without ``@number`` it is all location."""
    location, at, number = text.rpartition("@")
    if at and location and number.isascii() and number.isdigit():
        return location, int(number)
    return text, None


def _versions(weights: StoredWeights, location: str, version: int | None) -> list[int]:
    """The committed versions, or the one asked for; never none."""
    versions = weights.versions()
    if not versions:
        raise ConfigError(f"{location}: no weights are published yet")
    if version is not None and version not in versions:
        there = ", ".join(map(str, versions))
        raise ConfigError(f"{location}: no version {version}; published and kept: {there}")
    return versions if version is None else [version]


def _manifests(weights: StoredWeights, location: str, version: int | None) -> list[WeightManifest]:
    manifests = []
    for each in _versions(weights, location, version):
        with contextlib.suppress(KeyError):  # retired since it was listed
            manifests.append(weights.manifest(each))
    if not manifests:
        raise ConfigError(f"{location}: what was asked for is being retired; list it again")
    return manifests


def _list(
    weights: StoredWeights, manifests: list[WeightManifest], now: float, as_json: bool
) -> int:
    latest = weights.latest()
    newest = None if latest is None else latest.version
    rows = [
        {
            "version": manifest.version,
            "step": manifest.optimizer_step,
            "size_bytes": sum(part.size_bytes for part in manifest.parts),
            "digest": manifest.digest,
            "parent": manifest.parent,
            "cast": manifest.cast,
            "base": manifest.base and manifest.base.version,
            "age_secs": round(max(now - manifest.created_at, 0.0), 3),
        }
        for manifest in manifests
    ]
    if as_json:
        print(json.dumps({"latest": newest, "versions": rows}))
        return 0
    print(
        f"{'version':>8}  {'step':>8}  {'size':>10}  {'age':>8}  {'digest':<12}  "
        f"{'parent':<12}  form"
    )
    for row in rows:
        print(
            f"{row['version']:>8}  {row['step']:>8}  {row['size_bytes'] / 1e6:>7.1f} MB  "
            f"{row['age_secs']:>6.0f} s  {row['digest'][:12]:<12}  {row['parent'][:12]:<12}  "
            + (row["cast"] + " " if row["cast"] else "")
            + ("full" if row["base"] is None else f"delta of {row['base']}")
            + ("  <- LATEST" if row["version"] == newest else "")
        )
    return 0


def _verify(weights: StoredWeights, versions: list[int], as_json: bool) -> int:
    """Verify every version, also after the first that is damaged."""
    problems: dict[int, str] = {}
    for version in versions:
        try:
            weights.verify(version)
        except KeyError as e:
            if version in weights.versions():  # else retired since it was listed
                problems[version] = str(e.args[0])
        except StorageError as e:
            problems[version] = str(e)
        if not as_json:
            print(f"version {version}: {problems.get(version, 'sound')}")
    if as_json:
        print(json.dumps({"checked": versions, "damaged": problems}))
    if problems:
        print(
            f"headrace weights: {len(problems)} of {len(versions)} versions are damaged",
            file=sys.stderr,
        )
    return StorageError.exit_code if problems else 0


def _export(store: ObjectStore, manifest: WeightManifest, folder: Path, as_json: bool) -> int:
    files = export_model(store, manifest, folder)
    if as_json:
        print(json.dumps({"version": manifest.version, "folder": str(folder), "files": files}))
    else:
        print(f"version {manifest.version} -> {folder}: {', '.join(files)}")
    return 0
