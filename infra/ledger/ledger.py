"""The ledger: what each step consumed, in order, written before the step's gradient.

``ledger/step-00000012.json`` is created if absent; whoever creates it owns the step.
"""

from __future__ import annotations

from infra.contracts.errors import StorageError
from infra.contracts.json_codec import from_json, to_marker
from infra.contracts.manifests import LedgerEntry
from infra.storage import run_layout
from infra.storage.listing import keys_after
from infra.storage.object_store import ObjectStore
from infra.storage.read_many import read_many

_PREFIX = "ledger/"


def append(store: ObjectStore, entry: LedgerEntry) -> bool:
    """Claim ``entry.step``. False: another trainer has claimed it, with other words.

    The same entry again is True, so a write whose answer was lost can be repeated.
    """
    if store.create(run_layout.ledger_step(entry.step), to_marker(entry)):
        return True
    return read(store, entry.step) == entry


def read(store: ObjectStore, step: int) -> LedgerEntry | None:
    """Return what step ``step`` consumed, or None if nobody has claimed it."""
    try:
        return _decode(store, step, store.read(run_layout.ledger_step(step)))
    except KeyError:
        return None


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
                f"{_name(store, steps[0] + index)}: this step is missing in the ledger while later "
                "ones exist; restore the file"
            )
    contents = read_many(store, [run_layout.ledger_step(number) for number in steps])
    return [_decode(store, number, data) for number, data in zip(steps, contents, strict=True)]


def _decode(store: ObjectStore, step: int, data: bytes) -> LedgerEntry:
    entry = from_json(LedgerEntry, data, name=_name(store, step))
    if entry.step != step:
        raise StorageError(f"{_name(store, step)}: it holds step {entry.step}; restore the file")
    return entry


def _name(store: ObjectStore, step: int) -> str:
    return f"{store.url.rstrip('/')}/{run_layout.ledger_step(step)}"


def _step_of(key: str) -> int:
    return int(key.rpartition("-")[2].removesuffix(".json"))
