"""``headrace weights RUN show`` and ``gc``."""

from __future__ import annotations

import json

import numpy as np
import pytest

from infra.clock import ManualClock
from infra.commands import main as headrace
from infra.storage.local_store import LocalStore
from infra.weights.command import main
from infra.weights.delta import DeltaPolicy
from infra.weights.leases import HeldLease
from infra.weights.stored_weights import StoredWeights


@pytest.fixture
def run(tmp_path):
    """0 full, 1 a delta of it, 2 full, ... 6; checkpoints 5 and 6; two versions are kept."""
    store = LocalStore(tmp_path / "run")
    store.create("run.toml", b"[checkpoint]\nkeep_versions = 1\n")
    store.create("checkpoints/5/state", b"x")
    store.create("checkpoints/6/state", b"x")
    clock = ManualClock(100.0)
    weights = StoredWeights(store, "demo", clock=clock, deltas=DeltaPolicy(full_every=2))
    parent = ""
    for version in range(7):
        values = np.zeros((100, 100), "f4")
        values[version, 7] = 1
        manifest = weights.publish(
            version, {"w": values}, parent=parent, incarnation="one", epoch=3, cuts={"w": (1, 2)}
        )
        parent = manifest.digest
    HeldLease(store, weights, "eval", 1, secs=10.0, clock=clock)
    return tmp_path / "run"


def test_show(run, capsys):
    assert main([str(run), "show", "1"], ManualClock(110.0)) == 0
    out = capsys.readouterr().out
    for words in ("base: 0", "incarnation: one", "w  float32[100x100]  2 pieces along axis 1"):
        assert words in out
    assert "2 changed" in out and "parents: v0 " in out and ".delta" in out
    assert main([f"{run}@2", "show", "--json"], ManualClock(110.0)) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["version"], shown["base"], shown["epoch"], shown["age_secs"]) == (2, None, 3, 10)
    assert [len(shown["parts"]), len(shown["parents"])] == [2, 2]
    assert shown["tensors"][0]["parts"] == [0, 1]


def test_gc(run, capsys):
    reasons = {
        "0": "base of 1",
        "1": "used by lease eval",
        "4": "base of 5",
        "5": "a restart replays it",
        "6": "LATEST, a restart replays it",
    }
    assert main([str(run), "gc", "--dry-run", "--json"], ManualClock(110.0)) == 0
    said = json.loads(capsys.readouterr().out)
    assert said == {"dry_run": True, "deleted": [2, 3], "kept": reasons}
    assert StoredWeights(LocalStore(run), "").versions() == list(range(7))
    assert main([str(run), "gc"], ManualClock(110.0)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "version 2: deleted" and lines[1] == "version 1: used by lease eval"
    assert StoredWeights(LocalStore(run), "").versions() == [0, 1, 4, 5, 6]
    assert headrace(["weights", str(run), "verify"]) == 0
    assert headrace(["weights", f"{run}@2", "show"]) == 2
    assert "no version 2; published and kept: 0, 1, 4, 5, 6" in capsys.readouterr().err


def test_gc_deletes_nothing_while_a_lease_is_damaged(run, capsys):
    (run / "control/leases/eval.json").write_text("{")
    assert headrace(["weights", str(run), "gc"]) == 3
    assert "control/leases/eval.json: cannot read Lease" in capsys.readouterr().err
    assert len(StoredWeights(LocalStore(run), "").versions()) == 7


def test_verify_names_the_damaged_base(run, capsys):
    part = next((run / "weights/v00000000").glob("*.safetensors"))
    data = part.read_bytes()
    part.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert headrace(["weights", str(run), "verify", "--json"]) == 3
    damaged = json.loads(capsys.readouterr().out)["damaged"]
    assert damaged.keys() == {"0", "1"} and part.name in damaged["1"]
