from __future__ import annotations

import numpy as np
import pytest

from infra.clock import ManualClock
from infra.contracts.errors import SchemaMismatch
from infra.storage import run_layout
from infra.storage.memory_store import MemoryStore
from infra.weights.leases import MARGIN_SECS, HeldLease, leases
from infra.weights.stored_weights import StoredWeights

START = 1_000_000.0


class JumpingClock(ManualClock):
    """A clock that somebody sets back."""

    def jump(self, secs: float) -> None:
        self._now += secs


@pytest.fixture
def setting():
    store = MemoryStore()
    clock = ManualClock(START)
    weights = StoredWeights(store, "r", clock=clock)
    weights.publish(3, {"a": np.ones(2, "f4")})
    return store, weights, clock


def lease(setting, clock, name="eval", **options):
    store, weights, _ = setting
    return HeldLease(store, weights, name, 3, **{"secs": 100.0, "clock": clock} | options)


def versions(store, now):
    return {name: found.version for name, found in leases(store, now).items()}


def test_it_lasts_until_the_margin_is_over(setting):
    store, _, clock = setting
    held = lease(setting, clock)
    assert versions(store, START + 100 + MARGIN_SECS) == {"eval": 3}
    assert versions(store, START + 101 + MARGIN_SECS) == {}
    clock.advance(90)
    held.refresh()
    assert versions(store, START + 190 + MARGIN_SECS) == {"eval": 3}
    held.release()
    assert versions(store, START) == {}
    held.release()


def test_a_lease_from_the_future_is_alive(setting):
    store, _, _ = setting
    lease(setting, ManualClock(START + 1e7))
    assert versions(store, START) == {"eval": 3}


@pytest.mark.parametrize("back", [50.0, 5_000.0, 5e8])
def test_a_holder_whose_clock_jumps_back_keeps_its_lease(setting, back):
    store, _, _ = setting
    clock = JumpingClock(START)
    held = lease(setting, clock)
    clock.jump(-back)
    for minute in range(1, 40):
        clock.advance(60)
        held.refresh()
        assert versions(store, START + 60 * minute) == {"eval": 3}


def test_a_holder_whose_clock_is_behind_from_the_start(setting):
    store, _, clock = setting
    lease(setting, ManualClock(5.0))
    assert versions(store, clock.now()) == {"eval": 3}


def test_a_collector_whose_clock_jumps_back(setting):
    store, _, clock = setting
    lease(setting, clock)
    assert versions(store, 0.0) == {"eval": 3}


def test_a_restarted_reader_never_shortens_its_lease(setting):
    store, _, clock = setting
    lease(setting, clock, secs=5_000.0)
    lease(setting, clock, secs=10.0)
    assert leases(store, START)["eval"].expires_at == START + 5_000


def test_a_version_that_is_gone_cannot_be_leased(setting):
    store, weights, clock = setting
    with pytest.raises(KeyError, match=r"version 4 .*not committed"):
        HeldLease(store, weights, "eval", 4, secs=10.0, clock=clock)
    assert leases(store, START) == {}


def test_a_damaged_lease_is_named(setting):
    store, _, clock = setting
    key = run_layout.weights_lease("eval")
    lease(setting, clock)
    data = store.read(key)
    store.delete(key)
    store.create(key, data.replace(b'"version":3', b'"version":2'))
    with pytest.raises(SchemaMismatch, match=f"{key}: cannot read Lease"):
        leases(store, START)
