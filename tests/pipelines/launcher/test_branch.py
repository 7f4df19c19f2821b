from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from infra.config import read_toml
from infra.contracts.errors import ConfigError, DamagedObject
from infra.storage.local_store import LocalStore
from infra.weights.stored_weights import StoredWeights
from pipelines.launcher.branch import branch, main
from pipelines.launcher.role_commands import RoleCommands

FAKE = Path(__file__).with_name("fake_headrace.py")
COMMANDS = RoleCommands(headrace=(sys.executable, str(FAKE), ""))


@pytest.fixture
def parent(tmp_path, monkeypatch):
    """A run with three versions and a tokenizer."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    run, model = tmp_path / "old", tmp_path / "model"
    run.mkdir()
    model.mkdir()
    (model / "tokenizer.json").write_text("{}")
    (run / "run.toml").write_text('[run]\nname = "old"\n[prompts]\nsource = "addition"\n')
    weights = StoredWeights(LocalStore(run), "old")
    facts = {"hf": {"model_type": "llama"}, "folder": str(model)}
    for version in range(3):
        arrays = {"w": np.full(3, version, np.float32)}
        weights.publish(version, arrays, model_config=facts)
    return run


def test_a_branch_is_a_run_with_a_model_and_a_lineage(parent, tmp_path):
    new = tmp_path / "new"
    assert branch(f"{parent}@1", str(new), ["run.seed=5"], COMMANDS) == 1
    tree = read_toml(new / "run.toml")
    assert (tree["run"]["name"], tree["run"]["seed"]) == ("new", 5)
    digest = StoredWeights(LocalStore(parent), "").manifest(1).digest
    lineage = {"parent": str(parent), "parent_run": "old", "version": 1, "digest": digest}
    assert json.loads((new / "lineage.json").read_text()) == lineage
    assert (new / "control" / "init.json").exists()
    assert {path.name for path in (new / "init").iterdir()} >= {
        *("model.safetensors", "config.json", "tokenizer.json"),
    }


def test_the_newest_version_is_the_default(parent, tmp_path):
    assert branch(str(parent), str(tmp_path / "new"), [], COMMANDS) == 2


@pytest.mark.parametrize(
    ("source", "target", "overrides", "words"),
    [
        ("old@7", "new", [], "no such version; published and kept: 0, 1, 2"),
        ("gone@1", "new", [], "there is no run"),
        ("old@1", "old", [], "it is not empty"),
        ("old@1", "new", ["optimizer.lr"], "give section.key=value"),
        ("old@1", "new", ["run.sed=1"], "unknown key 'sed'; did you mean 'seed'?"),
    ],
)
def test_bad_input_writes_nothing(parent, tmp_path, source, target, overrides, words):
    with pytest.raises(ConfigError) as refused:
        branch(str(tmp_path / source), str(tmp_path / target), overrides, COMMANDS)
    assert words in str(refused.value)
    assert not (tmp_path / "new").exists()


def test_damaged_weights_are_not_copied(parent, tmp_path):
    (part,) = (parent / "weights" / "v00000001").glob("*.safetensors")
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    with pytest.raises(DamagedObject):
        branch(f"{parent}@1", str(tmp_path / "new"), [], COMMANDS)
    assert not (tmp_path / "new").exists()


def test_help(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "headrace branch" in capsys.readouterr().out
