"""Another's emulator, another's reading of the API: what it knows of it works there as well.

It takes one request at a time, ignores preconditions and start offsets, and tells no generation
with the bytes: so no contract runs here (docs/storage.md).
"""

from __future__ import annotations

import socket

import pytest
from gcp_storage_emulator.server import create_server

from infra.contracts.errors import DamagedObject, StorageError
from infra.storage.gcs_store import GcsStore
from tests.infra.storage.gcs_objects import MULTIPLE


def test_create_read_list_delete():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with create_server("127.0.0.1", port, in_memory=True, default_bucket="bucket"):
        store = GcsStore(
            "bucket", "run", endpoint=f"127.0.0.1:{port}", deadline_secs=5.0, chunk_bytes=MULTIPLE
        )
        large = bytes(range(256)) * 4096
        assert store.read_with_token("a/b") is None
        assert store.create("a/b", b"small") and store.create("c/large", [large, b"x"])
        assert store.read("a/b") == b"small" and store.read("c/large") == large + b"x"
        assert store.read_range("c/large", 1 << 20, 1) == b"x"
        with pytest.raises(DamagedObject):
            store.read_range("a/b", 3, 3)
        assert store.list_after("") == ["a/b", "c/large"] and store.list_folders("") == ["a", "c"]
        assert store.list_after("", after="a/b") == store.list_after("c") == ["c/large"]
        with pytest.raises(StorageError, match="lacks x-goog-generation"):
            store.read_with_token("a/b")
        store.delete("a/b")
        store.delete("a/b")
        assert store.list_after("") == ["c/large"]
