"""Which weight versions a run still needs (DESIGN section 4). Decides only; deletes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def reasons_to_keep(
    versions: Iterable[int],
    *,
    latest: int,
    keep_versions: int,
    checkpoint_version: int | None,
    leased: Mapping[int, str] | None = None,
    bases: Mapping[int, int] | None = None,
) -> dict[int, str]:
    """Return the versions to keep and why, for ``WeightStore.retire``.

    Args:
        versions: the committed ones.
        latest: where LATEST points.
        keep_versions: how many of the newest stay in any case; at least 1.
        checkpoint_version: version of the last durable checkpoint. A restart replays from there to
            LATEST and compares digests on the way, so that chain stays. None (no checkpoint yet)
            means that the replay begins at the first version: everything stays.
        leased: versions that somebody still uses (generates with, evaluates, branches from): who.
        bases: delta version -> the full version that it changes; stays as long as the delta.
    """
    if keep_versions < 1:
        raise ValueError(f"keep_versions = {keep_versions}; at least 1")
    ordered = sorted(set(versions))
    chain = ordered[0] if checkpoint_version is None and ordered else checkpoint_version or 0
    reasons: dict[int, list[str]] = {}
    for version in [version for version in ordered if version <= latest][-keep_versions:]:
        why = "LATEST" if version == latest else f"one of the newest {keep_versions}"
        reasons.setdefault(version, []).append(why)
    for version in ordered:
        if version >= min(chain, latest):
            why = "no checkpoint yet" if checkpoint_version is None else "a restart replays it"
            reasons.setdefault(version, []).append(why)
    for version, who in (leased or {}).items():
        if version in ordered:
            reasons.setdefault(version, []).append(f"used by {who}")
    for version, base in (bases or {}).items():
        if version in reasons and base in ordered:
            reasons.setdefault(base, []).append(f"base of {version}")
    return {version: ", ".join(reasons[version]) for version in sorted(reasons)}
