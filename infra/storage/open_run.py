"""Open the store of a run that exists: what every command that only reads a run starts with."""

from __future__ import annotations

from infra.contracts.errors import ConfigError
from infra.storage.object_store import ObjectStore
from infra.storage.open_store import open_store


def open_run(location: str) -> ObjectStore:
    """Return the store of the run at ``location``.

    Raises:
        ConfigError: there is nothing; the name was probably mistyped.
    """
    store = open_store(location)
    if not store.list_after("", limit=1):
        raise ConfigError(f"{location}: there is no run; give the folder of one")
    return store
