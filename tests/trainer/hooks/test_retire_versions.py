from __future__ import annotations

import numpy as np
import pytest

from infra.clock import ManualClock
from infra.contracts.manifests import LedgerEntry
from infra.storage import run_layout
from infra.storage.memory_store import MemoryStore
from infra.weights.delta import DeltaPolicy
from infra.weights.leases import MARGIN_SECS, HeldLease
from infra.weights.stored_weights import StoredWeights
from trainer.hooks.publish_weights import RetireVersions
from trainer.loop import StepInfo


class Setting:
    def __init__(self) -> None:
        self.store, self.clock = MemoryStore(), ManualClock()
        self.weights = StoredWeights(
            self.store, "r", clock=self.clock, deltas=DeltaPolicy(full_every=4)
        )
        self.used: dict[int, str] = {}
        self.hook = RetireVersions(
            self.store, self.weights, 2, lambda: self.version, lambda: self.used, self.clock
        )
        self.version = -1

    def step(self) -> dict[str, float]:
        self.version += 1
        values = np.arange(5_000, dtype="f4")
        values[self.version] = -1
        self.weights.publish(self.version, {"w": values})
        entry = LedgerEntry(
            step=self.version,
            groups=(),
            lag_max=0,
            incarnation="i",
            settings_digest="s",
            created_at=0.0,
        )
        info = StepInfo(
            entry=entry, state=None, replayed=False, metrics={}, updated_at=0.0, seconds={}
        )
        self.hook.after_step(info)
        return info.metrics


@pytest.fixture
def setting():
    return Setting()


def test_the_newest_and_their_base_stay(setting):
    for _ in range(7):
        setting.step()
    assert setting.weights.bases([5, 6]) == {5: 4, 6: 4}
    assert setting.weights.versions() == [4, 5, 6]


def test_leased_and_used_versions_stay(setting):
    setting.step()
    HeldLease(setting.store, setting.weights, "eval", 0, secs=60.0, clock=setting.clock)
    setting.used = {2: "worker"}
    for _ in range(8):
        setting.step()
    assert setting.weights.versions() == [0, 2, 4, 7, 8]
    setting.clock.advance(61 + MARGIN_SECS)
    setting.used = {}
    setting.step()
    assert setting.weights.versions() == [8, 9]


def test_a_lease_that_cannot_be_read_stops_deleting_not_the_run(setting):
    key = run_layout.weights_lease("eval")
    setting.store.create(key, b"{}")
    assert [setting.step() for _ in range(4)] == [{"retire_blocked": 1.0}] * 4
    assert setting.weights.versions() == [0, 1, 2, 3]
    setting.store.delete(key)
    assert setting.step() == {}
    assert setting.weights.versions() == [0, 3, 4]
