"""Which weight versions a run still needs (DESIGN section 4). Decides only; deletes nothing."""

from __future__ import annotations

from collections.abc import Iterable


def versions_to_keep(
    versions: Iterable[int],
    *,
    latest: int,
    keep_versions: int,
    checkpoint_version: int | None,
    leased: Iterable[int] = (),
) -> set[int]:
    """Return the versions to keep, for ``WeightStore.retire``.

    Args:
        versions: the committed ones.
        latest: where LATEST points.
        keep_versions: how many of the newest stay in any case; at least 1.
        checkpoint_version: version of the last durable checkpoint. A restart replays from there to
            LATEST and compares digests on the way, so that chain stays. None (no checkpoint yet)
            means that the replay begins at the first version: everything stays.
        leased: versions that somebody still uses: generates with, evaluates, branches from.
    """
    if keep_versions < 1:
        raise ValueError(f"keep_versions = {keep_versions}; at least 1")
    ordered = sorted(set(versions))
    chain = ordered[0] if checkpoint_version is None and ordered else checkpoint_version or 0
    published = [version for version in ordered if version <= latest]
    return (
        set(published[-keep_versions:])
        | (set(leased) & set(ordered))
        | {version for version in ordered if version >= min(chain, latest)}
    )
