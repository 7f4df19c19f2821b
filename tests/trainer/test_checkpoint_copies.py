"""Checkpoints that are copied to a store: another machine goes on from the newest complete one."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from infra.contracts.errors import StorageError
from infra.storage.memory_store import MemoryStore
from trainer.checkpoint import Progress
from trainer.checkpoint_copies import CopiedCheckpoints, open_checkpoints
from trainer.state import new_state


def state_of(value):
    return new_state({"w": jnp.full((3, 2), value)}, optax.adam(1e-3), seed=1)


def save(checkpoints, *versions):
    for version in versions:
        checkpoints.save(state_of(float(version)), Progress(version=version, groups=version * 4))
        checkpoints.wait()


def restored(checkpoints):
    found = checkpoints.restore(jax.eval_shape(lambda: state_of(0.0)))
    return found and (float(found[0].params["w"][0, 0]), found[1])


def test_another_machine_goes_on_from_the_newest_copy(tmp_path):
    store = MemoryStore()
    checkpoints = open_checkpoints(store, 2, tmp_path / "one")
    assert isinstance(checkpoints, CopiedCheckpoints)
    assert checkpoints.durable() is None and restored(checkpoints) is None
    save(checkpoints, 1, 2, 3)
    assert checkpoints.durable() == 3
    checkpoints.close()
    assert store.list_folders("checkpoints") == ["2", "3"]
    other = open_checkpoints(store, 2, tmp_path / "two")
    assert restored(other) == (3.0, Progress(version=3, groups=12))
    other.close()


def test_what_was_never_copied_is_forgotten(tmp_path):
    store, lost = MemoryStore(), MemoryStore()
    first = open_checkpoints(store, 2, tmp_path)
    save(first, 1)
    first.close()
    astray = open_checkpoints(lost, 2, tmp_path / "lost")
    save(astray, 9)
    astray.close()
    (tmp_path / "lost" / "9").rename(tmp_path / "9")
    again = open_checkpoints(store, 2, tmp_path)
    assert restored(again) == (1.0, Progress(version=1, groups=4))
    again.close()


def test_a_copy_that_fails_is_told_and_made_anew(tmp_path):
    class Full(MemoryStore):
        full = True

        def create(self, key, data, *, durable=True):
            if self.full and key.startswith("checkpoints/"):
                raise StorageError(f"{key}: quota")
            return super().create(key, data, durable=durable)

    store = Full()
    checkpoints = open_checkpoints(store, 2, tmp_path)
    with pytest.raises(StorageError, match="quota"):
        save(checkpoints, 1)
    store.full = False
    checkpoints.wait()
    assert checkpoints.durable() == 1
    checkpoints.close()
    np.testing.assert_array_equal(state_of(1.0).params["w"], np.ones((3, 2)))
