"""The whole trainer on a run folder: learning, restarts at every write, fencing, the end."""

from __future__ import annotations

import json

import pytest

from infra.contracts.errors import ConfigError, Fenced
from infra.ledger import ledger
from infra.ledger.audit import audit
from infra.metrics import MetricsReader
from infra.storage import run_layout
from infra.storage.local_store import LocalStore
from infra.weights.stored_weights import StoredWeights
from tests.trainer.miniature_run import Dying, Killed, Rollouts, published, run_trainer

STEPS = 5
KEEP = {"checkpoint": {"every_steps": 2, "every_secs": 1e9, "keep_versions": 99}}


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Digests of a run that nothing disturbed."""
    run_dir = tmp_path_factory.mktemp("straight") / "run"
    assert run_trainer(run_dir, STEPS, **KEEP) == STEPS
    return published(run_dir)


def test_a_straight_run_trains_every_group_once(tmp_path):
    run_dir = tmp_path / "run"
    assert run_trainer(run_dir, STEPS) == STEPS
    store = LocalStore(run_dir)
    entries = ledger.entries_after(store, 0)
    assert [e.step for e in entries] == [1, 2, 3, 4, 5]
    counts = audit(store)
    assert (counts.trained, counts.lost, counts.twice) == (2 * STEPS, 0, 0)
    rows = [r for r in MetricsReader(store, "trainer").poll() if "trainer/step/loss" in r]
    assert [r["trainer/step/version"] for r in rows] == [1, 2, 3, 4, 5]
    for phase in ("wait", "read", "pack", "step", "ledger", "publish", "checkpoint"):
        assert rows[0][f"trainer/step/{phase}_secs"] >= 0
    assert rows[0]["trainer/step/lag_max"] == 0
    assert rows[0]["trainer/step/reward"] == 0.5
    manifest = StoredWeights(store, "test").latest()
    assert (manifest.version, manifest.optimizer_step, manifest.incarnation) == (5, 5, "one")
    assert (run_dir / "checkpoints" / "5").is_dir()


KILLS = {
    "ledger": run_layout.ledger_step(4),
    "weights": run_layout.weights_folder(4),
    "manifest": run_layout.weights_manifest(4),
}


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("what", ["ledger", "weights", "manifest", "LATEST"])
def test_killed_at_any_write_the_run_goes_on_bit_for_bit(tmp_path, straight, what, after):
    run_dir = tmp_path / "run"
    pointer = {"seen": 0}

    def dies(key):
        if what == "LATEST" and key == run_layout.WEIGHTS_LATEST:
            pointer["seen"] += 1
            return pointer["seen"] == 5  # version 4; the first was version 0
        return what != "LATEST" and key.startswith(KILLS[what])

    with pytest.raises(Killed):
        run_trainer(run_dir, STEPS, store=Dying(run_dir, dies, after), **KEEP)
    assert run_trainer(run_dir, STEPS, name="two", **KEEP) == STEPS
    assert published(run_dir) == straight
    counts = audit(LocalStore(run_dir))
    assert (counts.trained, counts.lost, counts.twice) == (2 * STEPS, 0, 0)


@pytest.mark.parametrize("stop_at", [1, 2, 3, 4])
def test_resuming_at_any_step_equals_the_straight_run(tmp_path, straight, stop_at):
    run_dir = tmp_path / "run"
    run_trainer(run_dir, stop_at, **KEEP)
    assert run_trainer(run_dir, STEPS, name="two", **KEEP) == STEPS
    assert published(run_dir) == straight


def test_without_any_checkpoint_the_ledger_is_replayed_from_the_start(tmp_path, straight):
    run_dir = tmp_path / "run"
    never = {"checkpoint": {"every_steps": 99, "every_secs": 1e9, "keep_versions": 99}}
    dies = Dying(run_dir, lambda key: key.startswith(run_layout.ledger_step(4)), True)
    with pytest.raises(Killed):
        run_trainer(run_dir, STEPS, store=dies, **never)
    assert run_trainer(run_dir, STEPS, name="two", **never) == STEPS
    assert published(run_dir) == straight


def test_a_diverged_replay_is_said_and_not_published_over(tmp_path):
    """Version 3 was published by other hardware, say: it stays, version 4 has parent 'replay'."""
    run_dir, other = tmp_path / "run", tmp_path / "other"
    lr = {"optimizer": {"lr": 2e-2, "warmup_steps": 0}}
    run_trainer(other, 3, **KEEP, **lr)
    run_trainer(run_dir, 2, **KEEP)
    store = LocalStore(run_dir)
    weights = StoredWeights(store, "test")
    foreign = StoredWeights(LocalStore(other), "test")
    Rollouts(store).wait(0)

    with pytest.raises(Killed):
        dying = Dying(run_dir, lambda key: key.startswith(run_layout.ledger_step(3)), True)
        run_trainer(run_dir, STEPS, store=dying, name="two", **KEEP)
    weights.publish(3, foreign.fetch(3))
    digest = weights.manifest(3).digest

    assert run_trainer(run_dir, STEPS, name="three", **KEEP) == STEPS
    assert weights.manifest(3).digest == digest
    assert weights.manifest(4).parent == "replay"
    assert weights.manifest(5).parent == weights.manifest(4).digest
    rows = MetricsReader(store, "trainer").poll()
    diverged = [r["trainer/step/replay_diverged"] for r in rows if r["trainer/step/version"] == 3]
    assert diverged[-1] == 1.0


def test_other_settings_refuse_to_replay(tmp_path):
    run_dir = tmp_path / "run"
    dying = Dying(run_dir, lambda key: key.startswith(run_layout.ledger_step(2)), True)
    with pytest.raises(Killed):
        run_trainer(run_dir, STEPS, store=dying)
    with pytest.raises(ConfigError, match="ledger step 1 was made with other"):
        run_trainer(run_dir, STEPS, name="two", optimizer={"lr": 0.5})


def test_a_second_trainer_fences_the_first(tmp_path):
    run_dir = tmp_path / "run"

    class TakenOver(Rollouts):
        def wait(self, timeout_secs):
            run_trainer(run_dir, 2, name="two")
            return super().wait(timeout_secs)

    with pytest.raises(Fenced, match=r"trainer one of .* was replaced by trainer two"):
        run_trainer(run_dir, STEPS, wakeups=TakenOver(LocalStore(run_dir)))
    assert {e.incarnation for e in ledger.entries_after(LocalStore(run_dir), 0)} == {"two"}


def test_versions_are_retired_but_for_the_chain_from_the_checkpoint(tmp_path):
    run_dir = tmp_path / "run"
    run_trainer(run_dir, 8, checkpoint={"every_steps": 3, "every_secs": 1e9, "keep_versions": 2})
    assert set(published(run_dir)) == {6, 7, 8}
    assert sorted(p.name for p in (run_dir / "checkpoints").iterdir()) == ["6", "8"]


@pytest.mark.parametrize(
    ("word", "value"),
    [
        (run_layout.CONTROL_DONE, {"reason": "no_trainable_groups", "version": 2}),
        (run_layout.command("drain"), {"reason": "drained"}),
    ],
)
def test_it_ends_when_the_controller_is_done_or_drain_is_wished(tmp_path, word, value):
    run_dir = tmp_path / "run"
    store = LocalStore(run_dir)

    class Ends(Rollouts):
        def wait(self, timeout_secs):
            if StoredWeights(store, "test").latest().version == 2:
                store.create(word, json.dumps(value).encode())
                return []
            return super().wait(timeout_secs)

    assert run_trainer(run_dir, STEPS, wakeups=Ends(store)) == 2
    assert (run_dir / "checkpoints" / "2").is_dir()


def test_two_minibatches_make_one_version(tmp_path):
    run_dir = tmp_path / "run"
    run_trainer(run_dir, 2, training={"minibatches": 2})
    manifest = StoredWeights(LocalStore(run_dir), "test").latest()
    assert (manifest.version, manifest.optimizer_step) == (2, 4)
