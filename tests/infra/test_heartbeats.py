from __future__ import annotations

import os

import pytest

from infra.clock import ManualClock
from infra.contracts.errors import DamagedObject
from infra.heartbeats import BUCKET_SECS, RESERVED, Heartbeat, read_heartbeats
from infra.storage import run_layout
from infra.storage.local_store import LocalStore
from infra.storage.memory_store import MemoryStore


@pytest.fixture(params=["memory", "local"])
def store(request, tmp_path):
    return MemoryStore() if request.param == "memory" else LocalStore(tmp_path)


def test_a_beat_says_what_and_since_when(store):
    clock = ManualClock(100.0)
    heart = Heartbeat(store, "trainer", clock)
    heart.beat("stepping", version=3)
    clock.advance(5.0)
    heart.beat("stepping", version=4)
    assert read_heartbeats(store) == {
        "trainer": {
            "role": "trainer",
            "state": "stepping",
            "waiting_for": "",
            "since": 100.0,
            "at": 105.0,
            "pid": os.getpid(),
            "idle_share": 0.0,
            "version": 4,
        }
    }


@pytest.mark.parametrize(
    "secs, state, waiting_for, written",
    [
        (0.2, "stepping", "", False),
        (1.0, "stepping", "", True),
        (0.2, "saving", "", True),
        (0.2, "stepping", "rollouts", True),
        (0.0, "stepping", "", False),
    ],
)
def test_what_is_new_is_written_at_once_the_rest_seldom(store, secs, state, waiting_for, written):
    clock = ManualClock(100.0)
    heart = Heartbeat(store, "trainer", clock)
    heart.beat("stepping")
    clock.advance(secs)
    heart.beat(state, waiting_for)
    assert (read_heartbeats(store)["trainer"]["at"] == 100.0 + secs) == (written or secs == 0)
    assert read_heartbeats(store)["trainer"]["state"] == (state if written else "stepping")


def test_in_a_bucket_an_object_is_not_written_more_often_than_it_may_be():
    store, clock = MemoryStore(), ManualClock(100.0)
    store.url = "gs://bucket/run"
    heart = Heartbeat(store, "trainer", clock)
    said = []
    for beat in range(100):
        heart.beat("stepping" if beat % 2 else "saving")
        said.append(read_heartbeats(store)["trainer"]["at"])
        clock.advance(0.25)
    assert sorted(set(said)) == [100.0 + BUCKET_SECS * i for i in range(13)]
    heart.beat("stopped")
    assert read_heartbeats(store)["trainer"]["state"] == "stopped"


def test_what_was_not_said_in_time_is_said_with_the_next_beat():
    store, clock = MemoryStore(), ManualClock(100.0)
    store.url = "gs://bucket/run"
    heart = Heartbeat(store, "trainer", clock, every_secs=60.0)
    heart.beat("stepping")
    clock.advance(0.5)
    heart.beat("saving")
    clock.advance(BUCKET_SECS)
    heart.beat("saving")
    assert read_heartbeats(store)["trainer"]["state"] == "saving"


def test_idle_share_is_time_spent_waiting(store):
    clock = ManualClock(0.0)
    heart = Heartbeat(store, "trainer", clock)
    for secs, state, waiting_for in ((0, "waiting", "rollouts"), (3, "stepping", ""), (1, "x", "")):
        clock.advance(secs)
        heart.beat(state, waiting_for)
    assert read_heartbeats(store)["trainer"]["idle_share"] == 0.75
    heart.beat("y", idle_share=0.5)
    assert read_heartbeats(store)["trainer"]["idle_share"] == 0.5


def test_a_new_process_takes_over(store):
    clock = ManualClock()
    old, new = Heartbeat(store, "trainer", clock), Heartbeat(store, "trainer", clock)
    old.beat("a")
    new.beat("b")
    old.beat("c")
    assert read_heartbeats(store)["trainer"]["state"] == "c"


def test_roles_stand_side_by_side(store):
    clock = ManualClock()
    assert read_heartbeats(store) == {}
    for role in ("controller", "rollouts-0", "rollouts-1"):
        Heartbeat(store, role, clock).beat("running", "trainer")
    assert list(read_heartbeats(store)) == ["controller", "rollouts-0", "rollouts-1"]


def test_what_it_writes_itself_cannot_be_given():
    for name in RESERVED - {"state", "waiting_for"}:
        with pytest.raises(ValueError, match=name):
            Heartbeat(MemoryStore(), "trainer", ManualClock()).beat("x", **{name: 1})


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"\xff"])
def test_damage_is_named(data):
    store = MemoryStore()
    store.create(run_layout.heartbeat("trainer"), data)
    with pytest.raises(DamagedObject, match=r"trainer\.json: not a heartbeat"):
        read_heartbeats(store)
