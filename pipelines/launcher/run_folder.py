"""The run's folder: created once with its resolved configuration, or taken up again."""

from __future__ import annotations

import contextlib
import fcntl
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from infra.config import to_toml
from infra.contracts.errors import ConfigError, SchemaMismatch
from infra.storage import run_layout
from infra.storage.object_store import ObjectStore
from pipelines.launcher.compare_configs import differing_keys
from pipelines.launcher.launcher_state import replace_object

SHOWN_DIFFERENCES = 6


@contextlib.contextmanager
def only_launcher(folder: Path) -> Iterator[None]:
    """Hold the folder for this launcher. Raises ``ConfigError`` when another holds it.

    The lock is the kernel's, so it ends with the process that holds it, however it ends.
    """
    path = folder / run_layout.LAUNCHER_LOCK
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{folder}: another `headrace run` works in this folder; wait for it, stop it, "
                "or give another --run-dir"
            ) from None
        yield


def stored_configuration(store: ObjectStore) -> dict[str, Any] | None:
    """Return the folder's resolved configuration, None for a new folder."""
    found = store.read_with_token(run_layout.RUN_CONFIG)
    if found is None:
        return None
    try:
        return tomllib.loads(found[0].decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise SchemaMismatch(f"{store.url}/{run_layout.RUN_CONFIG}: not TOML: {e}") from e


def refuse_other_configuration(store: ObjectStore, tree: Mapping[str, Any]) -> bool:
    """Return whether the folder holds this run already.

    Raises:
        ConfigError: it holds a run of another configuration; names the differing keys.
    """
    stored = stored_configuration(store)
    if stored is None:
        return False
    changes = differing_keys(stored, tree)
    if changes:
        more = len(changes) - SHOWN_DIFFERENCES
        shown = "; ".join(changes[:SHOWN_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")
        raise ConfigError(
            f"{store.url}: holds a run of another configuration ({shown}); give another --run-dir, "
            "or the configuration it was started with (only [stop] and the port may change)"
        )
    return True


def enter_run(store: ObjectStore, tree: Mapping[str, Any]) -> bool:
    """Create ``run.toml``, or take up the run that is there; True when resumed.

    A resumed run gets the new [stop], and what the last session's end left behind is cleared.
    """
    text = to_toml(tree).encode()
    resumed = refuse_other_configuration(store, tree)
    if not resumed:
        if not store.create(run_layout.RUN_CONFIG, text):
            return enter_run(store, tree)
    elif store.read(run_layout.RUN_CONFIG) != text:
        replace_object(store, run_layout.RUN_CONFIG, text)
    for key in store.list_after(run_layout.COMMANDS):
        store.delete(key)
    store.delete(run_layout.CONTROL_DONE)
    return resumed
