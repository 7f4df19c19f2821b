"""A run in a bucket, by the same command: and another machine, which has no file of it, goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from infra.bearer_token import WORKER
from infra.ledger.audit import audit
from infra.storage.gcs_store import GcsStore
from infra.weights.stored_weights import StoredWeights
from tests.end_to_end.running import ROOT
from tests.infra.storage.gcs_emulator import GcsEmulator

RUN = "gs://bucket/runs/tiny"
SETTINGS = (
    "warm_start.target=0.05",
    "prompts.held_out=0.0",
    "admission.groups_per_step=8",
    "training.minibatches=2",
    "checkpoint.every_steps=2",
)


def headrace(emulator: GcsEmulator, machine: Path, *words: str) -> str:
    """One command on one machine; its standard output."""
    machine.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-m", "infra.commands", *words],
        cwd=machine,
        env={
            **os.environ,
            "STORAGE_EMULATOR_HOST": emulator.endpoint,
            "PYTHONPATH": str(ROOT),
            WORKER: "a-secret",  # the worker asks for it, the pipelines show it
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
def test_a_run_in_a_bucket_is_taken_up_by_another_machine(tmp_path):
    with GcsEmulator("bucket") as emulator:
        first, second = tmp_path / "first", tmp_path / "second"
        config = str(ROOT / "examples" / "tiny.toml")
        sets = [word for item in (*SETTINGS, "stop.updates=3") for word in ("--set", item)]
        said = headrace(emulator, first, "run", config, "--run-dir", RUN, "--json", *sets)
        assert json.loads(said)["updates"] == 3
        said = headrace(emulator, second, "run", RUN, "--set", "stop.updates=5", "--json")
        assert json.loads(said)["updates"] == 5

        store = GcsStore("bucket", "runs/tiny", endpoint=emulator.endpoint)
        result = audit(store)
        assert (result.trained, result.lost, result.twice, result.in_flight) == (40, 0, 0, 0)
        weights = StoredWeights(store, "")
        newest = weights.latest()
        assert newest is not None and newest.version == 5
        assert weights.manifest(4).digest == newest.parent
        assert "sound" in headrace(emulator, second, "audit", RUN)
        assert json.loads(headrace(emulator, second, "weights", RUN, "sync", "--json"))["versions"]
        assert json.loads(headrace(emulator, second, "weights", RUN, "verify", "--json"))
