"""What the trainer publishes besides plain float32, and what it does with a damaged shard."""

from __future__ import annotations

import numpy as np
import pytest

from infra.ledger import ledger
from infra.shards.quarantine import quarantined
from infra.shards.shard_writer import write_shard
from infra.storage.local_store import LocalStore
from infra.weights.cast import dequantised
from infra.weights.stored_weights import StoredWeights
from tests.trainer.miniature_run import Rollouts, published, run_trainer
from tests.trainer.sequences import make_training_group

KEEP = {"checkpoint": {"every_steps": 2, "every_secs": 1e9, "keep_versions": 99}}
DELTAS = {
    "training": {"publish_dtype": "bfloat16"},
    "weights": {"full_every": 3, "max_delta_share": 1.0},
}


def arrays_of(run_dir, version):
    weights = StoredWeights(LocalStore(run_dir), "")
    return dequantised(weights.fetch(version), weights.manifest(version))


def test_deltas_give_the_same_weights_and_survive_a_restart(tmp_path):
    whole, deltas = tmp_path / "whole" / "run", tmp_path / "deltas" / "run"
    whole.parent.mkdir(), deltas.parent.mkdir()
    assert run_trainer(whole, 5, training=DELTAS["training"], **KEEP) == 5
    assert run_trainer(deltas, 3, **DELTAS, **KEEP) == 3
    assert run_trainer(deltas, 5, name="two", **DELTAS, **KEEP) == 5
    assert published(deltas) == published(whole)
    weights = StoredWeights(LocalStore(deltas), "")
    forms = {v: weights.manifest(v).base for v in weights.versions()}
    assert any(base is not None for base in forms.values())
    for version, base in forms.items():
        assert base is None or (base.version < version and forms[base.version] is None)
        for name, array in arrays_of(deltas, version).items():
            assert np.array_equal(array, arrays_of(whole, version)[name]), (version, name)


@pytest.mark.parametrize(("dtype", "bound"), [("bfloat16", 2**-8), ("int8", 1 / 127)])
def test_a_cast_version_is_close_to_the_trainers_own(tmp_path, dtype, bound):
    exact, cast = tmp_path / "exact" / "run", tmp_path / "cast" / "run"
    exact.parent.mkdir(), cast.parent.mkdir()
    run_trainer(exact, 1)
    run_trainer(cast, 1, training={"publish_dtype": dtype})
    assert StoredWeights(LocalStore(cast), "").manifest(1).cast == dtype
    approximate = arrays_of(cast, 1)
    for name, array in arrays_of(exact, 1).items():
        error = np.abs(approximate[name].astype(np.float32) - array)
        assert error.max() <= bound * np.abs(array).max(), name


class Damaging(Rollouts):
    """The first shard that is committed has a flipped bit."""

    done = False

    def wait(self, timeout_secs):
        if self.done:
            return super().wait(timeout_secs)
        self.done = True
        self._admit(102)
        groups = [make_training_group(index, version=0) for index in (100, 101)]
        manifest = write_shard(self._store, groups, recipe_digest="recipe-digest", now=0.0)
        data = bytearray(self._store.read(manifest.data_key))
        data[len(data) // 2] ^= 1
        self._store.delete(manifest.data_key)
        self._store.create(manifest.data_key, bytes(data))
        return [{}]


def test_a_damaged_shard_is_set_aside_and_never_trained(tmp_path):
    run_dir = tmp_path / "run"
    store = LocalStore(run_dir)
    assert run_trainer(run_dir, 2, wakeups=Damaging(store)) == 2
    assert len(quarantined(store)) == 1
    lost = {make_training_group(index, version=0).group_id for index in (100, 101)}
    trained = {group for entry in ledger.entries_after(store, 0) for group, _ in entry.groups}
    assert len(trained) == 4 and not trained & lost
