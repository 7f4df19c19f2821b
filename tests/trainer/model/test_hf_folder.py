"""Hugging Face folders: what is saved is what was loaded, in one file or several."""

import json
import shutil

import ml_dtypes
import numpy as np
import pytest

from infra.contracts.errors import ConfigError
from infra.text.tokenizer import load_tokenizer, write_char_tokenizer
from tests.trainer.model.families import NAMES, write_folder
from trainer.model.hf_folder import INDEX, read_arrays, save_model
from trainer.model.params_io import to_named
from trainer.model.pretrained import load_model
from trainer.sft import write_model_folder

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture
def source(tmp_path):
    folder = write_folder("gemma3", tmp_path / "source")
    write_char_tokenizer(folder, "0123456789+=.", eos=".")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.mark.parametrize("part_bytes", [1 << 30, 20_000])
@pytest.mark.parametrize("name", NAMES)
def test_save_and_load_change_no_bit(name, part_bytes, tmp_path):
    source = write_folder(name, tmp_path / "source")
    config, params = load_model(source, 0)
    named = to_named(params)
    save_model(tmp_path / "saved", config, named, source=source, part_bytes=part_bytes)
    assert (tmp_path / "saved" / INDEX).exists() == (part_bytes == 20_000)
    again, loaded = load_model(tmp_path / "saved", 99)
    assert again == config
    for key, array in to_named(loaded).items():
        np.testing.assert_array_equal(array, named[key], err_msg=key, strict=True)
    files = list((tmp_path / "saved").glob("*.safetensors"))
    assert all(p.stat().st_size < part_bytes + 10_000 for p in files)


def test_bfloat16_stays_bfloat16(source, tmp_path):
    config, params = load_model(source, 0)
    half = {k: v.astype(ml_dtypes.bfloat16) for k, v in to_named(params).items()}
    save_model(tmp_path / "half", config, half, source=source)
    facts = json.loads((tmp_path / "half" / "config.json").read_text())
    assert facts["dtype"] == "bfloat16"
    for name, array in read_arrays(tmp_path / "half").items():
        assert array.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(array, half[name])


def test_tokenizer_template_and_end_ids_come_along(source, tmp_path):
    config, params = load_model(source, 0)
    save_model(tmp_path / "saved", config, to_named(params), source=source)
    assert load_tokenizer(tmp_path / "saved").digest == load_tokenizer(source).digest
    assert (tmp_path / "saved" / "chat_template.jinja").read_text() == TEMPLATE
    with pytest.raises(ConfigError, match="saved is not empty"):
        save_model(tmp_path / "saved", config, to_named(params), source=source)


@pytest.fixture
def cut(source, tmp_path):
    config, params = load_model(source, 0)
    save_model(tmp_path / "cut", config, to_named(params), source=source, part_bytes=20_000)
    return tmp_path / "cut"


def test_a_warm_start_from_several_files_is_one_and_keeps_the_template(cut, tmp_path):
    config, params = load_model(cut, 0)
    write_model_folder(cut, tmp_path / "warm", to_named(params))
    assert load_model(tmp_path / "warm", 0)[0] == config
    assert load_tokenizer(tmp_path / "warm").digest == load_tokenizer(cut).digest


def rewrite_index(folder, change):
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))


def test_files_that_the_index_does_not_name_are_left_alone(cut):
    (cut / "consolidated.safetensors").write_bytes(b"another form of the same weights")
    load_model(cut, 0)


def test_without_an_index_files_of_another_form_are_left_alone(source):
    shutil.copyfile(source / "config.json", source / "consolidated.safetensors")
    load_model(source, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i: i["weight_map"].update({"more": "model-00001-of-00004.safetensors"}), "no more"),
        (lambda i: i["weight_map"].update({"model.norm.weight": "gone.safetensors"}), "gone"),
        (lambda i: i["weight_map"].update({"model.norm.weight": "../x"}), "outside the folder"),
        (lambda i: i.pop("weight_map"), "not an index of weights"),
        (lambda i: i.update(weight_map=[1]), "not an index of weights"),
    ],
)
def test_a_broken_index_is_one_line(cut, change, message):
    rewrite_index(cut, change)
    with pytest.raises(ConfigError, match=message) as caught:
        load_model(cut, 0)
    assert "\n" not in str(caught.value)
