"""``headrace weights RUN show V``: what one version holds, and where it comes from."""

from __future__ import annotations

import contextlib
import json

from infra.contracts.manifests import WeightManifest
from infra.weights.manifest_file import pieces_of
from infra.weights.stored_weights import StoredWeights


def show(weights: StoredWeights, manifest: WeightManifest, now: float, as_json: bool) -> int:
    """Print one version: who published it, its parts, its tensors, its ancestors."""
    changed = {(delta.name, delta.piece): delta for delta in manifest.deltas}
    facts = {
        "version": manifest.version,
        "digest": manifest.digest,
        "optimizer_step": manifest.optimizer_step,
        "cast": manifest.cast,
        "base": manifest.base and manifest.base.version,
        "stored_bytes": sum(part.size_bytes for part in manifest.parts),
        "tensor_bytes": sum(entry.size_bytes for entry in manifest.tensors),
        "incarnation": manifest.incarnation,
        "epoch": manifest.epoch,
        "age_secs": round(max(now - manifest.created_at, 0.0), 3),
        "parents": _parents(weights, manifest),
        "parts": [{"key": part.key, "size_bytes": part.size_bytes} for part in manifest.parts],
    }
    tensors = [
        {
            "name": entry.name,
            "shape": list(entry.shape),
            "dtype": entry.dtype,
            "size_bytes": entry.size_bytes,
            "pieces": len(pieces_of(entry)),
            "axis": entry.axis,
            "parts": sorted({piece.part for piece in pieces_of(entry)}),
            "changed": sum(
                changed[entry.name, k].changed
                for k in range(len(pieces_of(entry)))
                if (entry.name, k) in changed
            ),
        }
        for entry in manifest.tensors
    ]
    if as_json:
        print(json.dumps(facts | {"tensors": tensors}))
        return 0
    for name, value in facts.items():
        if name == "parents":
            value = " <- ".join(value) or "none kept"
        if name == "parts":
            value = "".join(f"\n  {p['size_bytes'] / 1e6:>9.1f} MB  {p['key']}" for p in value)
        print(f"{name}: {value}")
    print(f"tensors: {len(tensors)}")
    for row in tensors:
        shape = "x".join(map(str, row["shape"])) or "scalar"
        cut = f"  {row['pieces']} pieces along axis {row['axis']}" if row["pieces"] > 1 else ""
        new = ""
        if manifest.base is not None and -1 in row["parts"]:
            new = f"  {row['changed']} changed"
        print(f"  {row['name']}  {row['dtype']}[{shape}]{cut}{new}")
    return 0


def _parents(weights: StoredWeights, manifest: WeightManifest) -> list[str]:
    """Who came before, newest first, as far as versions are kept: ``v11 3fa4...``."""
    digests = {}
    for version in weights.versions():
        with contextlib.suppress(KeyError):  # retired since it was listed
            digests[weights.manifest(version).digest] = weights.manifest(version)
    chain, parent = [], manifest.parent
    while parent:
        found = digests.pop(parent, None)
        chain.append(f"v{found.version} {parent[:12]}" if found else parent[:12])
        parent = found.parent if found else ""
    return chain
