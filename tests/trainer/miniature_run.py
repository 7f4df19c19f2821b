"""A whole run in a folder, without processes: a scripted engine commits groups for each version.

``Rollouts`` stands where controller, pipeline and worker would be: it is asked for wake-ups by the
trainer's feed, and answers by committing the next groups, made for the published version.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import jax
import safetensors.numpy

from infra.clock import ManualClock
from infra.contracts.json_codec import to_json
from infra.contracts.manifests import ControlState
from infra.contracts.records import Group
from infra.shards.shard_writer import write_shard
from infra.storage import run_layout
from infra.storage.local_store import LocalStore
from infra.text.tokenizer import write_char_tokenizer
from infra.weights.stored_weights import StoredWeights
from tests.trainer.sequences import MODEL, make_training_group
from trainer.config import TrainerConfig, parse_trainer
from trainer.model.hf_config import to_hf
from trainer.model.params_io import to_named
from trainer.model.transformer import init_params
from trainer.stopping import Stopping
from trainer.training_run import TrainingRun

GROUPS = 2


def make_config(run_dir: Path, updates: int, **sections: dict) -> TrainerConfig:
    """A run of ``updates`` steps of two groups on the test model."""
    tree = {
        "run": {"name": "test"},
        "prompts": {"source": "addition"},
        "sampling": {"n": 4, "max_new_tokens": 4},
        "admission": {"groups_per_step": GROUPS},
        "stop": {"updates": updates},
        "model": {"source": "folder", "path": str(run_dir.parent / "model")},
        "optimizer": {"lr": 1e-2, "warmup_steps": 0},
        "checkpoint": {"every_steps": 2, "every_secs": 1e9},
    }
    for name, table in sections.items():
        tree[name] = tree.get(name, {}) | table
    return parse_trainer(tree, "test.toml")


def write_model(folder: Path) -> None:
    """The test model as a Hugging Face folder."""
    if (folder / "config.json").exists():
        return
    write_char_tokenizer(folder, "0123456789+=.", eos=".")
    (folder / "config.json").write_text(json.dumps(to_hf(MODEL, bos=None, eos=(13,))))
    params = jax.jit(lambda key: init_params(MODEL, key))(jax.random.key(0))
    safetensors.numpy.save_file(to_named(params), folder / "model.safetensors")


class Rollouts:
    """Implements ``Wakeups``: each wait commits the groups of the next step.

    Args:
        store: the run.
        make: (admission index, version) -> group.
        limit: admissions altogether.
    """

    def __init__(
        self,
        store: LocalStore,
        make: Callable[[int, int], Group] | None = None,
        limit: int = 10**9,
    ) -> None:
        self._store, self._limit = store, limit
        self._make = make or (lambda index, version: make_training_group(index, version=version))

    def wait(self, timeout_secs: float) -> list[dict]:
        weights = StoredWeights(self._store, "test")
        version = weights.latest().version
        first = version * GROUPS
        indices = range(first, min(first + GROUPS, self._limit))
        if not indices:
            self._store.create(run_layout.CONTROL_DONE, b"{}")
            return []
        self._admit(indices[-1] + 1)
        groups = [self._make(index, version) for index in indices]
        write_shard(self._store, groups, recipe_digest="recipe-digest", now=0.0)
        return [{}]

    def _admit(self, next_index: int) -> None:
        """What the controller persists before it publishes prompts."""
        found = self._store.read_with_token(run_layout.CONTROL_STATE)
        state = ControlState(run="test", epoch=1, next_index=next_index)
        token = found and found[1]
        self._store.compare_and_swap(run_layout.CONTROL_STATE, to_json(state), token)


class Dying(LocalStore):
    """A local store whose process dies just before or just after one kind of write."""

    def __init__(self, root: Path, dies: Callable[[str], bool], after: bool) -> None:
        super().__init__(root)
        self._dies, self._after = dies, after

    def _write(self, key: str, write: Callable[[], object]) -> object:
        if not self._dies(key):
            return write()
        if self._after:
            write()
        raise Killed(key)

    def create(self, key, data, **options):
        return self._write(key, lambda: super(Dying, self).create(key, data, **options))

    def compare_and_swap(self, key, data, expected):
        return self._write(key, lambda: super(Dying, self).compare_and_swap(key, data, expected))


class Killed(Exception):
    """Stands for kill -9: nothing of ours catches it."""


def run_trainer(
    run_dir: Path,
    updates: int,
    *,
    store: LocalStore | None = None,
    name: str = "one",
    wakeups: object | None = None,
    **sections: dict,
) -> int:
    """One trainer process's life; returns the last version."""
    write_model(run_dir.parent / "model")
    store = store or LocalStore(run_dir)
    config = make_config(run_dir, updates, **sections)
    run = TrainingRun(
        store=store,
        config=config,
        stopping=Stopping(store, updates, GROUPS),
        wakeups=wakeups or Rollouts(LocalStore(run_dir)),
        clock=ManualClock(),
        name=name,
        # the session's compile cache (conftest): another folder would compile everything anew
        environ={"HEADRACE_CACHE": str(Path(jax.config.jax_compilation_cache_dir).parent)},
        scratch=Path(store.url),
    )
    return run.train()


def published(run_dir: Path) -> dict[int, str]:
    """Digest of every version that can still be read."""
    weights = StoredWeights(LocalStore(run_dir), "test")
    return {version: weights.manifest(version).digest for version in weights.versions()}
