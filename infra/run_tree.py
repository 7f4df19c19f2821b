"""A run's resolved configuration, ``run.toml``, as a tree; wherever the run lies."""

from __future__ import annotations

import os
import tomllib
from typing import Any

from infra.config import read_toml
from infra.contracts.errors import ConfigError
from infra.storage import run_layout
from infra.storage.object_store import ObjectStore
from infra.storage.open_store import open_store

Tree = dict[str, Any]


def read_run_tree(store: ObjectStore) -> tuple[Tree, str]:
    """Return the tree, and where it lies, for messages.

    Raises:
        ConfigError: there is no run, or its configuration is not TOML.
    """
    where = f"{store.url}/{run_layout.RUN_CONFIG}"
    try:
        return tomllib.loads(store.read(run_layout.RUN_CONFIG).decode()), where
    except KeyError:
        raise ConfigError(
            f"{where}: no run there; give the folder or gs:// location that 'headrace run' made"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigError(f"{where}: cannot be read as TOML: {e}") from e


def read_tree(location: str) -> tuple[Tree, str]:
    """Like ``read_run_tree``, of a TOML file, or of the run in a folder or bucket."""
    if is_run_location(location):
        return read_run_tree(open_store(location))
    return read_toml(location), location


def is_run_location(text: str) -> bool:
    """Whether it is where a run lies (or would), not a TOML file."""
    return "://" in text or os.path.isdir(text)
