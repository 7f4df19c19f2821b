"""Tokenizers and chat templates, on small ones made here."""

import json

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from infra.contracts.errors import ConfigError
from infra.contracts.records import Message
from infra.text.tokenizer import load_tokenizer, write_char_tokenizer, write_tokenizer

ALPHABET = "0123456789+=."
TEMPLATE = (
    "{% for m in messages %}{{ '<s>' + m['role'] + ':' + m['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


def text(content):
    return (Message(role="text", content=content),)


@pytest.fixture(scope="module")
def chars(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chars")
    write_char_tokenizer(folder, ALPHABET, eos=".")
    return load_tokenizer(folder)


def byte_tokenizer(folder, **named):
    """Every byte a token, plus <s> and </s>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True) for t in ("<s>", "</s>")])
    write_tokenizer(folder, backend, {"eos_token": "</s>", **named})
    return load_tokenizer(folder)


def test_one_character_is_one_token(chars):
    ids = chars.encode_prompt(text("12+34="))
    assert ids.dtype == np.int32
    assert ids.tolist() == [2, 3, 11, 4, 5, 12]
    assert chars.decode([7, 5, 13]) == "64."
    assert (chars.eos_ids, chars.pad_id, chars.vocab_size) == ((13,), 0, 14)
    assert chars.decode([0, 7, 0]) == "6"
    assert [chars.token_text(i) for i in (0, 2)] == ["<pad>", "1"]


@given(st.text(alphabet=ALPHABET, max_size=40))
def test_characters_round_trip(chars, content):
    assert chars.decode(chars.encode(content)) == content


def test_what_the_alphabet_lacks_is_refused(chars):
    with pytest.raises(ValueError, match="'1a' cannot be written in this vocabulary"):
        chars.encode("1a")


def test_no_template_asks_for_text(chars):
    with pytest.raises(ValueError, match="no chat template"):
        chars.encode_prompt((Message(role="user", content="1"),))


@pytest.mark.parametrize(
    "messages", [(), (Message(role="text", content="1"), Message(role="user", content="2"))]
)
def test_prompts_that_mean_nothing_are_refused(chars, messages):
    with pytest.raises(ValueError):
        chars.encode_prompt(messages)


def test_conversations_go_through_the_template_and_text_does_not(tmp_path):
    tokenizer = byte_tokenizer(tmp_path, chat_template=TEMPLATE)
    ids = tokenizer.encode_prompt(
        (Message(role="system", content="be"), Message(role="user", content="hi"))
    )
    shown = "".join(tokenizer.token_text(i) for i in ids)
    assert shown == "<s>system:be</s><s>user:hi</s><s>assistant:"
    assert tokenizer.decode(tokenizer.encode_prompt(text("<hi>"))) == "<hi>"


@given(st.text(max_size=60))
def test_any_text_survives_a_byte_tokenizer(tmp_path_factory, content):
    tokenizer = byte_tokenizer(tmp_path_factory.getbasetemp() / "bytes")
    if "<s>" not in content and "</s>" not in content:
        assert tokenizer.decode(tokenizer.encode(content)) == content


def test_half_a_character_decodes_to_a_replacement(tmp_path):
    tokenizer = byte_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode("é")[:1]) == "\ufffd"


def test_a_template_cannot_reach_outside(tmp_path):
    hostile = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    tokenizer = byte_tokenizer(tmp_path, chat_template=hostile)
    with pytest.raises(ValueError, match="the chat template refuses"):
        tokenizer.encode_prompt((Message(role="user", content="x"),))


def test_a_template_may_refuse_messages(tmp_path):
    tokenizer = byte_tokenizer(tmp_path, chat_template="{{ raise_exception('no tools here') }}")
    with pytest.raises(ValueError, match="no tools here"):
        tokenizer.encode_prompt((Message(role="tool", content="x"),))


def test_a_broken_template_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match="chat template, line 1"):
        byte_tokenizer(tmp_path, chat_template="{% for %}")


def test_the_digest_covers_rules_template_and_end(tmp_path):
    digests = {
        byte_tokenizer(tmp_path / "a").digest,
        byte_tokenizer(tmp_path / "b", chat_template=TEMPLATE).digest,
        byte_tokenizer(tmp_path / "c", eos_token="<s>").digest,
    }
    assert len(digests) == 3
    assert byte_tokenizer(tmp_path / "d").digest in digests


def test_end_ids_come_from_every_file(tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 9}))
    assert byte_tokenizer(tmp_path).eos_ids == (5, 7, 9, 257)


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda f: (f / "tokenizer.json").unlink(), "no tokenizer.json"),
        (lambda f: (f / "tokenizer.json").write_text("{"), "not a tokenizer file"),
        (lambda f: (f / "tokenizer_config.json").write_text("{"), "cannot be read as JSON"),
        (lambda f: (f / "tokenizer_config.json").unlink(), "no end-of-sequence token"),
    ],
)
def test_broken_folders_are_one_line(tmp_path, break_it, message):
    write_char_tokenizer(tmp_path, ALPHABET, eos=".")
    break_it(tmp_path)
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(tmp_path)
