"""All keys below a prefix, page by page."""

from __future__ import annotations

from collections.abc import Iterator

from infra.storage.object_store import ObjectStore

_PAGE = 10_000


def keys_after(store: ObjectStore, prefix: str, after: str = "") -> Iterator[str]:
    """Yield every key under ``prefix`` greater than ``after``, ascending."""
    while True:
        page = store.list_after(prefix, after=after, limit=_PAGE)
        yield from page
        if len(page) < _PAGE:  # not one more call to hear that there is nothing: polls are frequent
            return
        after = page[-1]
