from __future__ import annotations

from collections.abc import Iterator

import pytest

from infra.storage.gcs_store import GcsStore
from tests.infra.storage.gcs_emulator import GcsEmulator
from tests.infra.storage.gcs_stores import open_at


@pytest.fixture
def emulator() -> Iterator[GcsEmulator]:
    with GcsEmulator("bucket") as emulator:
        yield emulator


@pytest.fixture
def store(emulator: GcsEmulator) -> GcsStore:
    return open_at(emulator)
