"""The ledger: one owner per step, read back in order, gaps found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from infra.contracts.errors import SchemaMismatch, StorageError
from infra.contracts.manifests import LedgerEntry
from infra.ledger import ledger
from infra.storage import run_layout
from infra.storage.memory_store import MemoryStore


def entry(step: int, *groups: str, incarnation: str = "one") -> LedgerEntry:
    return LedgerEntry(
        step=step,
        groups=tuple((group, f"shard-of-{group}") for group in groups),
        lag_max=0,
        incarnation=incarnation,
        settings_digest="settings",
        created_at=float(step),
    )


def test_a_step_has_one_owner_and_the_owner_may_repeat_itself() -> None:
    store = MemoryStore()
    mine = entry(1, "a", "b")
    assert ledger.append(store, mine)
    assert ledger.append(store, mine)
    assert not ledger.append(store, replace(mine, incarnation="two"))
    assert ledger.read(store, 1) == mine
    assert ledger.read(store, 2) is None


def test_entries_come_in_the_order_of_steps() -> None:
    store = MemoryStore()
    entries = [entry(step, f"g{step}") for step in range(1, 13)]
    for one in reversed(entries):
        ledger.append(store, one)
    assert ledger.entries_after(store, 0) == entries
    assert ledger.entries_after(store, 9) == entries[9:]
    assert ledger.entries_after(store, 12) == []


def test_a_gap_is_an_error_that_names_the_file() -> None:
    store = MemoryStore()
    for step in (1, 2, 4):
        ledger.append(store, entry(step))
    with pytest.raises(StorageError, match=r"ledger/step-00000003\.json: this step is missing"):
        ledger.entries_after(store, 0)


def test_a_file_under_the_name_of_another_step_is_an_error() -> None:
    store = MemoryStore()
    ledger.append(store, entry(1))
    store.create(run_layout.ledger_step(2), store.read(run_layout.ledger_step(1)))
    with pytest.raises(StorageError, match="it holds step 1"):
        ledger.read(store, 2)


def test_a_flipped_digit_is_an_error_that_names_the_file() -> None:
    store = MemoryStore()
    ledger.append(store, entry(1, "a1"))
    key = run_layout.ledger_step(1)
    data = store.read(key).replace(b"shard-of-a1", b"shard-of-a3")
    store.delete(key)
    store.create(key, data)
    for read in (lambda: ledger.read(store, 1), lambda: ledger.entries_after(store, 0)):
        with pytest.raises(SchemaMismatch, match=r"ledger/step-00000001\.json: .*seal"):
            read()
