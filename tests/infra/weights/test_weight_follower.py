"""Following versions in a real store: the last good one stays, whatever happens to the newest."""

import json

import numpy as np
import pytest

from infra.clock import ManualClock
from infra.contracts.errors import ConfigError, StorageError
from infra.metrics import MetricsWriter
from infra.storage import run_layout
from infra.storage.memory_store import MemoryStore
from infra.weights.stored_weights import StoredWeights
from infra.weights.sync_report import report
from infra.weights.sync_times import PARTS, SyncTimes
from infra.weights.weight_follower import WeightFollower


class FailingStore(MemoryStore):
    """A store that can be made unreachable."""

    reachable = True

    def read_with_token(self, key):
        if not self.reachable:
            raise StorageError(f"{self.url}/{key}: cannot read: no route; check the network")
        return super().read_with_token(key)


class Bench:
    def __init__(self):
        self.store, self.clock = FailingStore(), ManualClock()
        self.taken, self.rows = [], []
        reader = StoredWeights(self.store, "test", clock=self.clock)
        self.times = SyncTimes(self.clock, self.rows.append)
        self.follower = WeightFollower(reader, self.take, self.times, self.clock)

    def take(self, manifest, arrays):
        assert {name: set(array.tolist()) for name, array in arrays.items()} == {
            "w": {manifest.version}
        }
        self.taken.append(manifest.version)

    def publish(self, version):
        weights = StoredWeights(self.store, "test", clock=self.clock)
        return weights.publish(version, {"w": np.full(2, version, np.float32)})

    def damage(self, version):
        (key,) = [
            k
            for k in self.store.list_after(run_layout.weights_folder(version) + "/")
            if k.endswith(".safetensors")
        ]
        data = bytearray(self.store.read(key))
        data[-1] ^= 1
        self.store.delete(key)
        self.store.create(key, bytes(data))


def test_the_newest_is_taken_once():
    bench = Bench()
    assert not bench.follower.poll()
    bench.publish(0)
    bench.publish(1)
    assert bench.follower.poll() and not bench.follower.poll()
    assert bench.taken == [1] and bench.follower.trouble == ""


def test_a_pinned_version_is_served_and_must_exist():
    bench = Bench()
    bench.publish(0)
    bench.publish(1)
    bench.follower.pin(0, bench.store)
    assert bench.taken == [0] and not bench.store.list_after(run_layout.WEIGHTS_LEASES)
    with pytest.raises(ConfigError, match=r"no version 9; committed: \[0, 1\]"):
        bench.follower.pin(9, bench.store)


def test_a_damaged_version_is_passed_over_and_the_next_one_taken():
    bench = Bench()
    bench.publish(0)
    bench.follower.poll()
    bench.publish(1)
    bench.publish(2)
    bench.damage(2)
    assert bench.follower.poll()
    assert bench.taken == [0, 1] and bench.follower.fallbacks == 1
    assert "version 1 is used instead" in bench.follower.trouble
    bench.publish(3)
    assert bench.follower.poll()
    assert bench.taken == [0, 1, 3] and bench.follower.trouble == ""


def test_with_nothing_sound_the_last_good_one_stays_and_attempts_become_rare():
    bench = Bench()
    bench.publish(0)
    bench.follower.poll()
    bench.publish(1)
    bench.damage(1)
    attempts = []
    for second in range(100):
        before = bench.follower.failures
        assert not bench.follower.poll()
        attempts += [second] * (bench.follower.failures - before)
        bench.clock.wait(1.0)
    assert bench.taken == [0] and "w" in bench.follower.trouble
    assert 5 <= len(attempts) <= 9
    gaps = np.diff(attempts)
    assert (np.diff(gaps) >= 0).all()


def test_a_store_that_is_gone_costs_nothing_but_time():
    bench = Bench()
    bench.publish(0)
    bench.follower.poll()
    bench.publish(1)
    bench.store.reachable = False
    assert not bench.follower.poll() and "no route" in bench.follower.trouble
    bench.store.reachable = True
    assert bench.follower.poll()
    assert bench.taken == [0, 1] and bench.follower.trouble == ""


def test_a_refused_first_version_ends_the_follower_a_later_one_is_left_alone():
    bench, tried = Bench(), []

    def take(manifest, arrays):
        tried.append(manifest.version)
        if manifest.version in refused:
            raise ConfigError("made with another tokenizer")

    bench.follower = WeightFollower(
        StoredWeights(bench.store, "test", clock=bench.clock), take, bench.times, bench.clock
    )
    refused = {0, 1}
    bench.publish(0)
    with pytest.raises(ConfigError, match="another tokenizer"):
        bench.follower.poll()
    refused = {1}
    assert bench.follower.poll()
    bench.publish(1)
    for _ in range(3):
        assert not bench.follower.poll()
        bench.clock.wait(100.0)
    assert bench.follower.trouble == "version 1 is refused: made with another tokenizer"
    bench.publish(2)
    assert bench.follower.poll() and bench.follower.trouble == ""
    assert tried == [0, 0, 1, 2]


def test_the_whole_way_of_a_version_is_timed_by_part():
    bench = Bench()
    bench.publish(0)
    bench.clock.wait(2.0)
    bench.follower.poll()
    bench.clock.wait(3.0)
    bench.times.mark(0, "swapped")
    bench.clock.wait(4.0)
    bench.times.mark(0, "first_token")
    bench.times.mark(0, "first_token")
    (row,) = bench.rows
    assert row["worker/weights/version"] == 0
    assert row["worker/weights/visible_secs"] == 2.0
    assert row["worker/weights/swap_secs"] == 3.0
    assert row["worker/weights/first_token_secs"] == 4.0
    assert row["worker/weights/sync_secs"] == 9.0


def test_a_version_that_was_overtaken_has_no_row():
    bench = Bench()
    for version in (0, 1):
        bench.publish(version)
        bench.follower.poll()
    bench.times.mark(1, "swapped")
    bench.times.mark(1, "first_token")
    bench.times.mark(0, "swapped")
    bench.times.mark(0, "first_token")
    assert [row["worker/weights/version"] for row in bench.rows] == [1]


def test_the_report_has_percentiles_over_versions_and_workers(capsys):
    store, clock = MemoryStore(), ManualClock()
    assert report(store, "runs/x", False) == 0 and "no worker" in capsys.readouterr().out
    for role, secs in (("worker", 1.0), ("worker-2", 3.0)):
        writer = MetricsWriter(store, role, "one", clock)
        row = {f"worker/weights/{part}_secs": 0.5 for part in (*PARTS, "sync")}
        writer.emit(row | {"worker/weights/version": 1, "worker/weights/sync_secs": secs})
        writer.flush()
    assert report(store, "runs/x", True) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["versions"] == 2 and said["seconds"]["fetch"]["p50"] == 0.5
    assert said["seconds"]["sync"] == {"p50": 2.0, "p90": 2.8, "p100": 3.0}
    assert report(store, "runs/x", False) == 0 and "sync" in capsys.readouterr().out
