"""``headrace weights RUN``: list, check and export the weight versions of a run."""

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
from infra.weights.export import export_model
from infra.weights.stored_weights import StoredWeights

_EXAMPLES = """examples:
  headrace weights runs/demo                   list the versions
  headrace weights runs/demo check             verify every byte of every version
  headrace weights runs/demo@12 export DIR     write version 12 as a Hugging Face folder
"""


def main(argv: Sequence[str], clock: Clock | None = None) -> int:
    """List, check or export. Raises ``ConfigError`` for what was asked wrongly."""
    parser = argparse.ArgumentParser(
        prog="headrace weights",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", metavar="RUN[@VERSION]", help="the run's folder")
    parser.add_argument("action", nargs="?", choices=("list", "check", "export"), default="list")
    parser.add_argument("folder", metavar="DIR", nargs="?", help="export: folder to write")
    parser.add_argument("--version", type=int, metavar="N", help="only this version")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    args = parser.parse_args(argv)
    if (args.action == "export") != (args.folder is not None):
        raise ConfigError(
            f"headrace weights {args.run} {args.action}: "
            + ("give the folder to export to" if args.folder is None else "takes no folder")
        )
    location, version = split_version(args.run)
    if version is not None and args.version not in (None, version):
        raise ConfigError(f"{args.run} and --version {args.version} disagree; give one of them")
    store = open_run(location)
    weights = StoredWeights(store, "")
    manifests = _manifests(weights, location, args.version if version is None else version)
    if args.action == "check":
        return _check(weights, manifests, args.json)
    if args.action == "export":
        return _export(store, weights, manifests[-1], Path(args.folder), args.json)
    return _list(weights, manifests, (clock or SystemClock()).now(), args.json)


def split_version(text: str) -> tuple[str, int | None]:
    """Split ``RUN@12`` into location and version; without ``@number`` it is all location."""
    location, at, number = text.rpartition("@")
    if at and location and number.isascii() and number.isdigit():
        return location, int(number)
    return text, None


def _manifests(weights: StoredWeights, location: str, version: int | None) -> list[WeightManifest]:
    """The committed versions, or the one asked for; never none."""
    versions = weights.versions()
    if not versions:
        raise ConfigError(f"{location}: no weights are published yet")
    if version is not None and version not in versions:
        there = ", ".join(map(str, versions))
        raise ConfigError(f"{location}: no version {version}; published and kept: {there}")
    manifests = []
    for each in versions if version is None else [version]:
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
            "age_secs": round(max(now - manifest.created_at, 0.0), 3),
        }
        for manifest in manifests
    ]
    if as_json:
        print(json.dumps({"latest": newest, "versions": rows}))
        return 0
    print(f"{'version':>8}  {'step':>8}  {'size':>10}  {'age':>8}  {'digest':<12}  parent")
    for row in rows:
        print(
            f"{row['version']:>8}  {row['step']:>8}  {row['size_bytes'] / 1e6:>7.1f} MB  "
            f"{row['age_secs']:>6.0f} s  {row['digest'][:12]:<12}  {row['parent'][:12]}"
            + ("  <- LATEST" if row["version"] == newest else "")
        )
    return 0


def _check(weights: StoredWeights, manifests: list[WeightManifest], as_json: bool) -> int:
    """Verify every version, also after the first that is damaged."""
    problems: dict[int, str] = {}
    for manifest in manifests:
        try:
            weights.fetch(manifest.version)
        except KeyError:
            continue  # retired since it was listed
        except StorageError as e:
            problems[manifest.version] = str(e)
        if not as_json:
            print(f"version {manifest.version}: {problems.get(manifest.version, 'sound')}")
    if as_json:
        checked = [manifest.version for manifest in manifests]
        print(json.dumps({"checked": checked, "damaged": problems}))
    if problems:
        print(
            f"headrace weights: {len(problems)} of {len(manifests)} versions are damaged",
            file=sys.stderr,
        )
    return StorageError.exit_code if problems else 0


def _export(
    store: ObjectStore,
    weights: StoredWeights,
    manifest: WeightManifest,
    folder: Path,
    as_json: bool,
) -> int:
    weights.fetch(manifest.version)  # verifies it
    files = export_model(store, manifest, folder)
    if as_json:
        print(json.dumps({"version": manifest.version, "folder": str(folder), "files": files}))
    else:
        print(f"version {manifest.version} -> {folder}: {', '.join(files)}")
    return 0
