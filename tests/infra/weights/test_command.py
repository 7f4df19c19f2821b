from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from infra.clock import ManualClock
from infra.commands import main as headrace
from infra.contracts.errors import ConfigError
from infra.storage.local_store import LocalStore
from infra.weights.command import main, split_version
from infra.weights.stored_weights import StoredWeights

HF = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 3}


def arrays(version: int) -> dict[str, np.ndarray]:
    return {
        "model.embed_tokens.weight": np.full((4, 3), version, "f4"),
        "model.norm.weight": np.full(3, version + 0.5, "f4"),
    }


@pytest.fixture
def run(tmp_path) -> Path:
    folder, model = tmp_path / "run", tmp_path / "model"
    model.mkdir()
    (model / "tokenizer.json").write_text('{"model": {}}')
    (model / "tokenizer_config.json").write_text("{}")
    (model / "model.safetensors").write_text("the old weights")
    for version in range(3):
        weights = StoredWeights(
            LocalStore(folder),
            "demo",
            clock=ManualClock(100.0 + version),
            part_bytes=1 if version == 2 else 1000,
        )
        weights.publish(
            version,
            arrays(version),
            optimizer_step=2 * version,
            model_config={"hf": HF, "folder": str(model)},
        )
    return folder


def damage(run: Path, version: int) -> None:
    part = next((run / "weights" / f"v{version:08d}").glob("*.safetensors"))
    data = part.read_bytes()
    part.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def test_list(run, capsys):
    assert main([str(run)], ManualClock(110.0)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["version", "step", "size", "age", "digest", "parent", "form"]
    assert [line.split()[:2] for line in lines[1:]] == [["0", "0"], ["1", "2"], ["2", "4"]]
    assert [line.endswith("<- LATEST") for line in lines[1:]] == [False, False, True]


def test_list_as_json(run, capsys):
    assert main([str(run), "--json", "--version", "1"], ManualClock(110.0)) == 0
    listed = json.loads(capsys.readouterr().out)
    manifest = StoredWeights(LocalStore(run), "demo").manifest(1)
    assert listed == {
        "latest": 2,
        "versions": [
            {
                "version": 1,
                "step": 2,
                "size_bytes": manifest.parts[0].size_bytes,
                "digest": manifest.digest,
                "parent": "",
                "cast": "",
                "base": None,
                "age_secs": 9.0,
            }
        ],
    }


def test_check(run, capsys):
    assert main([str(run), "check"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"version {v}: sound" for v in range(3)]
    damage(run, 1)
    assert main([str(run), "check"]) == 3
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0] == "version 0: sound" and lines[2] == "version 2: sound"
    assert "weights version 1: tensor model." in lines[1]
    assert err == "headrace weights: 1 of 3 versions are damaged\n"
    assert main([str(run), "check", "--version", "2"]) == 0
    assert main([f"{run}@1", "check", "--json"]) == 3
    assert list(json.loads(capsys.readouterr().out.splitlines()[-1])["damaged"]) == ["1"]


def test_export_one_file(run, tmp_path, capsys):
    target = tmp_path / "out"
    assert main([f"{run}@1", "export", str(target)]) == 0
    assert sorted(path.name for path in target.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    loaded = load_file(target / "model.safetensors")
    assert all(np.array_equal(loaded[name], array) for name, array in arrays(1).items())
    assert json.loads((target / "config.json").read_text()) == {**HF, "dtype": "float32"}
    assert (target / "tokenizer.json").read_text() == '{"model": {}}'


def test_export_of_several_parts_has_an_index(run, tmp_path):
    target = tmp_path / "out"
    assert main([str(run), "export", str(target)]) == 0, "LATEST without a version"
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 60}
    for name, array in arrays(2).items():
        assert np.array_equal(load_file(target / index["weight_map"][name])[name], array)


def test_a_damaged_version_is_not_exported(run, tmp_path, capsys):
    damage(run, 1)
    assert headrace(["weights", f"{run}@1", "export", str(tmp_path / "out")]) == 3
    assert not (tmp_path / "out").exists()


def test_a_full_folder_is_refused(run, tmp_path, capsys):
    assert headrace(["weights", f"{run}@1", "export", str(run)]) == 2
    assert "is not empty; give a new folder" in capsys.readouterr().err


def test_versions_without_a_configuration(tmp_path, capsys):
    StoredWeights(LocalStore(tmp_path / "run"), "demo").publish(0, arrays(0))
    assert headrace(["weights", str(tmp_path / "run"), "export", str(tmp_path / "out")]) == 2
    assert "no Hugging Face configuration" in capsys.readouterr().err


def test_a_model_folder_that_is_gone(run, tmp_path, capsys):
    (tmp_path / "model" / "tokenizer.json").unlink()
    (tmp_path / "model" / "tokenizer_config.json").unlink()
    assert headrace(["weights", str(run), "export", str(tmp_path / "out")]) == 2
    assert "no tokenizer files there" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["{run}@7"], "no version 7; published and kept: 0, 1, 2"),
        (["{run}", "--version", "7"], "no version 7"),
        (["{run}@1", "--version", "2"], "disagree"),
        (["{run}", "export"], "give the folder"),
        (["{run}", "list", "x"], "takes no 'x'"),
        (["{run}", "show", "x"], "x is no version"),
        (["{run}", "verify", "7"], "no version 7"),
        (["{run}@1", "show", "2"], "disagree"),
        (["{run}", "list", "--dry-run"], "--dry-run is for gc"),
        (["{run}x"], "there is no run"),
        (["{run}/weights/v00000001"], "no weights are published"),
    ],
)
def test_bad_input_is_one_line(run, capsys, arguments, words):
    assert headrace(["weights", *(text.format(run=run) for text in arguments)]) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1 and err.startswith("headrace weights: ")


@pytest.mark.parametrize(
    "text, split",
    [
        ("runs/demo", ("runs/demo", None)),
        ("runs/demo@12", ("runs/demo", 12)),
        ("runs/me@home", ("runs/me@home", None)),
        ("runs/me@home@3", ("runs/me@home", 3)),
        ("@3", ("@3", None)),
        ("run@", ("run@", None)),
        ("run@²", ("run@²", None)),
    ],
)
def test_split_version(text, split):
    assert split_version(text) == split


def test_nothing_published(tmp_path):
    LocalStore(tmp_path).create("run.toml", b"")
    with pytest.raises(ConfigError, match="no weights are published yet"):
        main([str(tmp_path)])
