"""One trainer at a time: ``control/trainer.json`` names the incarnation that owns the run.

Starting claims it by compare-and-swap; whoever finds another name there has been replaced and must
stop before it writes anything more. A repeated publication by a replaced trainer would be harmless
anyway (same version, same bytes), and the ledger lets only one of them own a step.
"""

from __future__ import annotations

import json

from infra.contracts.errors import DamagedObject, Fenced, SchemaMismatch
from infra.contracts.json_codec import seal, unseal
from infra.storage.object_store import ObjectStore
from infra.storage.run_layout import TRAINER_INCARNATION


class Incarnation:
    """The right to append to the ledger and to publish.

    Args:
        store: the run.
        name: unique to this process, e.g. random.
    """

    def __init__(self, store: ObjectStore, name: str) -> None:
        self._store = store
        self.name = name
        self.epoch = self._claim()
        """How many trainers this run has had, this one included."""

    def check(self) -> None:
        """Raise ``Fenced`` if another trainer has taken over."""
        holder = self._read()[0]
        if holder.get("incarnation") != self.name:
            raise Fenced(
                f"trainer {self.name} of {self._store.url} was replaced by trainer "
                f"{holder.get('incarnation')}; this one stops, let the other one go on"
            )

    def _claim(self) -> int:
        while True:
            holder, token = self._read()
            mine = {"incarnation": self.name, "epoch": holder.get("epoch", 0) + 1}
            data = seal(json.dumps(mine, sort_keys=True).encode())
            if self._store.compare_and_swap(TRAINER_INCARNATION, data, token) is not None:
                return mine["epoch"]

    def _read(self) -> tuple[dict, str | None]:
        found = self._store.read_with_token(TRAINER_INCARNATION)
        if found is None:
            return {}, None
        try:
            return json.loads(unseal(found[0])), found[1]
        except (SchemaMismatch, ValueError) as e:
            raise DamagedObject(
                f"{self._store.url}/{TRAINER_INCARNATION}: {e}; if no trainer runs, delete it"
            ) from e
