from __future__ import annotations

import pytest

from infra.storage.memory_store import MemoryStore
from tests.contracts.object_store_contract import ObjectStoreContract


class TestMemoryStore(ObjectStoreContract):
    @pytest.fixture
    def store(self) -> MemoryStore:
        return MemoryStore()
