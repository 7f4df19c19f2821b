from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.clock import ManualClock
from infra.contracts.errors import DamagedObject
from infra.metrics import MetricsReader, MetricsWriter, Tally, as_tally
from infra.storage.local_store import LocalStore
from infra.storage.memory_store import MemoryStore

VALUES = st.lists(st.integers(-1000, 1000).map(float))


@pytest.fixture(params=["memory", "local"])
def store(request, tmp_path):
    return MemoryStore() if request.param == "memory" else LocalStore(tmp_path)


def test_rows_come_back_once(store):
    clock = ManualClock(10.0)
    writer = MetricsWriter(store, "trainer", "i1", clock)
    reader = MetricsReader(store, "trainer")
    assert reader.poll() == []
    writer.emit({"trainer/step/loss": 0.5}, step=1)
    assert reader.poll() == [], "not flushed yet"
    writer.flush()
    writer.flush()
    assert reader.poll() == [{"at": 10.0, "step": 1, "trainer/step/loss": 0.5}]
    assert reader.poll() == []
    clock.advance(1.0)
    writer.emit(step=2)
    writer.emit(step=3)
    writer.flush()
    assert reader.poll() == [{"at": 11.0, "step": 2}, {"at": 11.0, "step": 3}]
    assert len(store.list_after("metrics/trainer/")) == 2, "one object a flush"
    assert len(MetricsReader(store, "trainer").poll()) == 3


def test_old_segments_are_flushed_by_the_next_row(store):
    clock = ManualClock()
    writer = MetricsWriter(store, "trainer", "i1", clock, flush_secs=2.0)
    writer.emit(step=1)
    clock.advance(2.0)
    writer.emit(step=2)
    assert [row["step"] for row in MetricsReader(store, "trainer").poll()] == [1, 2]


def test_incarnations_and_roles_do_not_mix_or_hide(store):
    clock = ManualClock()
    reader = MetricsReader(store, "rollouts-1")
    for number, (role, incarnation) in enumerate(
        [("rollouts-1", "m"), ("rollouts-1", "z-2"), ("rollouts-1", "a"), ("rollouts-12", "m")]
    ):
        writer = MetricsWriter(store, role, incarnation, clock)
        writer.emit(number=number)
        writer.flush()
        rows = reader.poll()
        assert [row["number"] for row in rows] == ([number] if role == "rollouts-1" else [])
        clock.advance(1.0)


def test_the_same_incarnation_twice_loses_nothing(store):
    for number in range(2):
        writer = MetricsWriter(store, "trainer", "again", ManualClock())
        writer.emit(number=number)
        writer.flush()
    assert [row["number"] for row in MetricsReader(store, "trainer").poll()] == [0, 1]


def test_values_survive(store):
    writer = MetricsWriter(store, "r", "i", ManualClock(0.0))
    values = {
        "nan": math.nan,
        "inf": -math.inf,
        "numpy": np.float32(0.5),
        "array": np.array(3),
        "text": "hello",
        "none": None,
        "flag": True,
        "dict": {"a": 1, "b": math.inf},
        "empty": Tally(),
    }
    writer.emit(values)
    writer.flush()
    (row,) = MetricsReader(store, "r").poll()
    assert math.isnan(row.pop("nan"))
    assert row == {
        "at": 0.0,
        "inf": -math.inf,
        "numpy": 0.5,
        "array": 3,
        "text": "hello",
        "none": None,
        "flag": True,
        "dict": {"a": 1, "b": math.inf},
        "empty": {"sum": 0.0, "count": 0, "min": math.inf, "max": -math.inf},
    }
    assert as_tally(row["empty"]) == Tally()
    json.loads(store.read("metrics/r/i-00000000.json"), parse_constant=pytest.fail)


def test_what_is_no_metric_is_refused(store):
    writer = MetricsWriter(store, "r", "i", ManualClock())
    with pytest.raises(TypeError, match="is no metric"):
        writer.emit(bad=object())
    writer.flush()
    assert store.list_after("") == []


def test_observations_are_tallied_between_flushes(store):
    writer = MetricsWriter(store, "r", "i", ManualClock(0.0))
    for secs in (1.0, 4.0, 2.5):
        writer.observe({"worker/generate/secs": secs}, tokens=10)
    writer.flush()
    writer.observe(tokens=5)
    writer.flush()
    first, second = MetricsReader(store, "r").poll()
    assert first["worker/generate/secs"] == {"sum": 7.5, "count": 3, "min": 1.0, "max": 4.0}
    assert as_tally(first["tokens"]).merge(as_tally(second["tokens"])).sum == 35
    assert as_tally(4) == Tally.of([4])


def test_threads_lose_nothing(store):
    writer = MetricsWriter(store, "r", "i", ManualClock(), flush_secs=0.0)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: writer.emit(i=i), range(50)))
    assert sorted(row["i"] for row in MetricsReader(store, "r").poll()) == list(range(50))


@pytest.mark.parametrize("data", [b"", b"{}x", b"[1]", b"7", b"\xff"])
def test_a_damaged_segment_is_named_and_hides_nothing(data):
    store = MemoryStore()
    writer = MetricsWriter(store, "r", "i", ManualClock())
    writer.emit(step=1)
    writer.flush()
    store.create("metrics/r/i-00000001.json", data)
    reader = MetricsReader(store, "r")
    with pytest.raises(DamagedObject, match=r"metrics/r/i-00000001\.json"):
        reader.poll()
    store.delete("metrics/r/i-00000001.json")
    assert [row["step"] for row in reader.poll()] == [1]


@given(VALUES, VALUES)
def test_tallies_of_parts_make_the_tally_of_the_whole(one, two):
    merged = Tally.of(one).merge(Tally.of(two))
    assert merged == Tally.of(one + two) == Tally.of(two).merge(Tally.of(one))
    assert merged.merge(Tally()) == merged
    assert math.isnan(merged.mean) if not one + two else merged.mean == np.mean(one + two)
