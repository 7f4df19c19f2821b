"""``headrace import``: what a folder holds, and what is wrong with it, in one line."""

from __future__ import annotations

import json

import pytest

from infra.contracts.errors import ConfigError
from infra.text.tokenizer import write_char_tokenizer
from tests.trainer.miniature_run import write_model
from tests.trainer.sequences import MODEL
from trainer.import_model import main


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "model"
    made.mkdir()
    write_model(made)
    return made


def test_a_good_folder_says_how_to_use_it(folder, capsys):
    assert main([str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["layers"], found["vocabulary"], found["context"]) == (1, 14, MODEL.max_len)
    assert main([str(folder)]) == 0
    assert f'source = "folder"\npath = "{folder}"' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda f: (f / "config.json").unlink(), "no config.json there"),
        (lambda f: (f / "config.json").write_text("{"), "cannot be read"),
        (lambda f: (f / "model.safetensors").unlink(), "safetensors"),
        (lambda f: (f / "tokenizer.json").unlink(), "tokenizer"),
        (
            lambda f: write_char_tokenizer(f, "abcdefghijklmnopqrst.", eos="."),
            "the tokenizer has 22 tokens, the model's embedding 14 rows",
        ),
    ],
)
def test_a_bad_folder_is_refused_in_one_line(folder, spoil, said):
    spoil(folder)
    with pytest.raises(ConfigError) as caught:
        main([str(folder)])
    assert said in str(caught.value) and "\n" not in str(caught.value)
