"""A trainer in miniature: it claims a step, changes its state and saves a checkpoint."""

from __future__ import annotations

import os
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from infra.contracts.manifests import LedgerEntry
from infra.ledger import ledger
from infra.storage.local_store import LocalStore
from tests.infra.faults.dying import watch_files
from trainer.checkpoint import Checkpoints, Progress, checkpoint_folder
from trainer.state import TrainState


def first_state() -> TrainState:
    values = jax.random.normal(jax.random.key(0), (1024,))
    return TrainState(
        params={"w": values},
        opt_state={"m": jnp.zeros_like(values)},
        rng=jax.random.key_data(jax.random.key(1)),
        step=jnp.int32(0),
        optimizer_step=jnp.int32(0),
    )


def train_to(folder: str, last: int) -> None:
    """Go on from what is there: the checkpoint, the ledger after it, then new steps."""
    store = LocalStore(folder)
    checkpoints = Checkpoints(checkpoint_folder(folder), keep=2)
    found = checkpoints.restore(jax.eval_shape(first_state))
    state, progress = found or (first_state(), Progress())
    for step in range(progress.version + 1, last + 1):
        entry = ledger.read(store, step) or LedgerEntry(
            step=step,
            groups=((f"group-{step}", f"shard-{step}"),),
            lag_max=0,
            incarnation="one",
            settings_digest="settings",
            created_at=float(step),
        )
        assert ledger.append(store, entry)
        state = _step(state, entry)
        progress = Progress(version=step, tokens=progress.tokens + 100, groups=step)
        checkpoints.save(state, progress)
        checkpoints.wait()
    checkpoints.close()


def _step(state: TrainState, entry: LedgerEntry) -> TrainState:
    moment = 0.9 * state.opt_state["m"] + entry.step * state.params["w"]
    return state.replace(
        params={"w": state.params["w"] - 0.01 * moment},
        opt_state={"m": moment},
        step=jnp.int32(entry.step),
    )


def train_and_die(folder: str, last: int, number: int) -> None:
    """In a child: die before the n-th change of a file below the run's folder."""
    watch_files(folder, number)
    train_to(folder, last)
    os._exit(0)


def seen(folder: str) -> tuple[object, list[LedgerEntry]]:
    """The newest checkpoint's content, and the ledger."""
    checkpoints = Checkpoints(checkpoint_folder(folder), keep=2)
    found = checkpoints.restore(jax.eval_shape(first_state))
    checkpoints.close()
    assert found is not None
    leaves = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(found[0])]
    return (leaves, found[1]), ledger.entries_after(LocalStore(folder), 0)


def names_below(folder: Path) -> set[str]:
    """Files and folders; of those that Orbax names and counts at random only where they lie."""
    names = (str(path.relative_to(folder)) for path in folder.rglob("*"))
    return {re.sub(r"/d/[0-9a-f]{32}$", "/d/*", name) for name in names if name != ".lock"}
