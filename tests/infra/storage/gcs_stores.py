"""Stores on an emulator, as its tests open them: they hardly wait before they try again."""

from __future__ import annotations

from infra.storage.gcs_store import GcsStore
from tests.infra.storage.gcs_emulator import GcsEmulator
from tests.infra.storage.gcs_objects import MULTIPLE


def open_at(
    emulator: GcsEmulator,
    prefix: str = "runs/one",
    *,
    bucket: str = "bucket",
    deadline_secs: float = 20.0,
) -> GcsStore:
    return GcsStore(
        bucket,
        prefix,
        endpoint=emulator.endpoint,
        deadline_secs=deadline_secs,
        first_wait_secs=0.001,
        chunk_bytes=MULTIPLE,
    )
