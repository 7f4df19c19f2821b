"""The ledger: what each step consumed, in order, written before the step's gradient.

``ledger/step-00000012.json`` is created if absent; whoever creates it owns the step.
"""

from __future__ import annotations

from infra.contracts.errors import StorageError
from infra.contracts.json_codec import from_json, to_json
from infra.contracts.manifests import LedgerEntry
from infra.storage import run_layout
from infra.storage.listing import keys_after
from infra.storage.object_store import ObjectStore

_PREFIX = "ledger/"


def append(store: ObjectStore, entry: LedgerEntry) -> bool:
    """Claim ``entry.step``. False: another trainer has claimed it, with other words.

    The same entry again is True, so a write whose answer was lost can be repeated.
    """
    if store.create(run_layout.ledger_step(entry.step), to_json(entry)):
        return True
    return read(store, entry.step) == entry


def read(store: ObjectStore, step: int) -> LedgerEntry | None:
    """Return what step ``step`` consumed, or None if nobody has claimed it."""
    try:
        data = store.read(run_layout.ledger_step(step))
    except KeyError:
        return None
    entry = from_json(LedgerEntry, data)
    if entry.step != step:
        raise StorageError(
            f"{store.url.rstrip('/')}/{run_layout.ledger_step(step)}: it holds step {entry.step}; "
            "restore the file"
        )
    return entry


def entries_after(store: ObjectStore, step: int) -> list[LedgerEntry]:
    """Return every entry of a step greater than ``step``, ascending.

    Raises:
        StorageError: a step is missing between two others (a step is only claimed in order).
    """
    keys = keys_after(store, _PREFIX, after=run_layout.ledger_step(step))
    steps = [_step_of(key) for key in keys]
    for index, number in enumerate(steps):
        if number != steps[0] + index:
            raise StorageError(
                f"{store.url.rstrip('/')}/{run_layout.ledger_step(steps[0] + index)}: this step "
                "is missing in the ledger while later ones exist; restore the file"
            )
    return [entry for number in steps if (entry := read(store, number)) is not None]


def _step_of(key: str) -> int:
    return int(key.rpartition("-")[2].removesuffix(".json"))
