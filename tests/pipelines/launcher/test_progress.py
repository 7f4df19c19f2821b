from __future__ import annotations

import io

import numpy as np
import pytest
from rich.console import Console

from infra.clock import ManualClock
from infra.contracts.manifests import LedgerEntry
from infra.contracts.records import Decision
from infra.heartbeats import Heartbeat
from infra.ledger import ledger
from infra.shards.shard_writer import write_shard
from infra.storage.memory_store import MemoryStore
from infra.weights.stored_weights import StoredWeights
from pipelines.launcher.live_table import (
    LineView,
    eta_secs,
    progress_line,
    run_table,
    who_does_what,
    who_waits,
)
from pipelines.launcher.progress import Progress
from tests.builders import make_group

NOW = 1000.0


def commit(store, *groups, now=NOW):
    return write_shard(store, groups, recipe_digest="recipe-digest", now=now)


def step(store, number, manifest, at=NOW, lag=0):
    entry = LedgerEntry(
        step=number,
        groups=tuple((group.group_id, manifest.data_digest) for group in manifest.groups),
        lag_max=lag,
        incarnation="i",
        settings_digest="s",
        created_at=at,
    )
    assert ledger.append(store, entry)


def publish(store, version):
    StoredWeights(store, "test").publish(version, {"w": np.full(1, version, np.float32)})


@pytest.fixture
def store():
    return MemoryStore()


def test_a_new_run_has_nothing(store):
    snapshot = Progress(store, "test").poll(NOW)
    assert (snapshot.version, snapshot.steps, snapshot.secs_per_step) == (-1, (), None)
    assert eta_secs(snapshot, 10) is None
    assert who_does_what(snapshot) == "no role has said anything"


def test_facts_come_from_shards_ledger_and_pointer(store):
    progress = Progress(store, "test")
    publish(store, 0)
    first = commit(store, make_group(0), make_group(1, rewards=[1.0, 1.0]))
    commit(store, make_group(2, decision=Decision.REJECTED))
    step(store, 1, first, at=NOW, lag=1)
    found = progress.poll(NOW + 10)
    (facts,) = found.steps
    assert (facts.groups, facts.rollouts, facts.tokens, facts.lag) == (2, 4, 12, 1)
    assert (facts.pass_rate, facts.reward) == (0.75, 0.75)
    assert found.trained == ()  # version 1 is not published yet
    assert found.committed == {"rollouts": 2, "rejects": 1}
    assert found.reasons == {"zero_variance": 1}
    assert found.rollouts_per_sec == pytest.approx(0.6)

    publish(store, 1)
    second = commit(store, make_group(3), now=NOW + 30)
    step(store, 2, second, at=NOW + 30)
    later = progress.poll(NOW + 100)
    assert [s.step for s in later.steps] == [1, 2] and len(later.trained) == 1
    assert later.secs_per_step == 30.0
    assert eta_secs(later, 3) == 60.0
    assert later.rollouts_per_sec == 0.0  # all longer ago than the window


def test_a_step_whose_shard_is_not_seen_waits_one_poll_only(store):
    progress = Progress(store, "test")
    manifest = commit(MemoryStore(), make_group(0))
    step(store, 1, manifest)
    assert progress.poll(NOW).steps == ()
    (facts,) = progress.poll(NOW).steps
    assert (facts.step, facts.groups, facts.pass_rate) == (1, 0, 0.0)


def test_what_people_see(store):
    clock = ManualClock(NOW)
    Heartbeat(store, "trainer", clock).beat("waiting", "2 groups: 1 is there", version=1)
    Heartbeat(store, "worker", clock).beat("decoding")
    for version in (0, 1):
        publish(store, version)
    step(store, 1, commit(store, make_group(0)))
    snapshot = Progress(store, "test").poll(NOW + 2)
    assert who_waits(snapshot) == "trainer waits for 2 groups: 1 is there"
    line = progress_line(snapshot, 4)
    assert line.startswith("version 1/4  reward 0.500  pass 50%  lag 0")
    assert line.endswith("| trainer waits for 2 groups")

    out = io.StringIO()
    view = LineView(out)
    view.show(snapshot, 4, NOW)
    view.show(snapshot, 4, NOW + 1)
    assert out.getvalue() == line + "\n"  # once a version

    console = Console(file=io.StringIO(), width=110)
    console.print(run_table(snapshot, 4, NOW + 40, "test"))
    shown = console.file.getvalue()
    for words in ("1/4", "50%", "trainer", "2 groups: 1 is there", "40 s ago", "decoding"):
        assert words in shown
