"""Tokenizers: text into ids once, ids into text once; nothing is ever re-tokenised.

A tokenizer is a folder in Hugging Face's form: ``tokenizer.json``, ``tokenizer_config.json`` (chat
template, names of special tokens), ``config.json`` or ``generation_config.json`` (end-of-sequence
ids). ``write_char_tokenizer`` makes such a folder for a model over a few characters.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from infra.contracts.errors import ConfigError
from infra.contracts.records import Message
from infra.text.chat_template import ChatTemplate

SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


class Tokenizer:
    """One model's tokenizer and chat template. Safe to use from several threads."""

    def __init__(
        self, backend: tokenizers.Tokenizer, template: str | None, facts: dict[str, Any]
    ) -> None:
        """``facts``: eos ids (``eos``), pad id (``pad``) and special token texts by name."""
        backend.no_truncation()  # an over-long prompt is the caller's to refuse, never cut silently
        backend.no_padding()
        self._backend = backend
        special = {name: facts[name] for name in SPECIAL_TOKEN_NAMES if name in facts}
        self._template = ChatTemplate(template, special) if template else None
        self.eos_ids: tuple[int, ...] = tuple(facts["eos"])
        """Ids that end a response."""
        self.pad_id: int = facts["pad"]
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.digest: str = _digest(backend.to_str(), template or "", repr(self.eos_ids))
        """Names vocabulary, rules and template; equal digests give equal ids."""

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be encoded."""
        return self._template is not None

    def encode_prompt(self, messages: Sequence[Message]) -> np.ndarray:
        """Return the prompt's ids, int32[P].

        One message of role ``text`` is encoded as it is (with the tokenizer's own begin token, if
        it has one); a conversation goes through the chat template.

        Raises:
            ValueError: no template, a role it refuses, or text that this vocabulary cannot write.
        """
        if not messages:
            raise ValueError("the prompt has no messages; give at least one")
        if any(m.role == "text" for m in messages):
            if len(messages) > 1:
                raise ValueError("a message of role 'text' must be alone in its prompt")
            return self.encode(messages[0].content, begin=True)
        if self._template is None:
            raise ValueError(
                "this tokenizer has no chat template; give the prompt as one message of role 'text'"
            )
        return self.encode(self._template.render(messages))

    def encode(self, text: str, *, begin: bool = False) -> np.ndarray:
        """Return the ids of ``text``, int32; ``begin`` adds the tokenizer's begin token, if any."""
        try:
            ids = self._backend.encode(text, add_special_tokens=begin).ids
        except Exception as e:  # the library raises bare Exception when there is no unknown token
            raise ValueError(f"{text[:60]!r} cannot be written in this vocabulary: {e}") from e
        return np.asarray(ids, dtype=np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text; special tokens are left out, broken bytes become U+FFFD."""
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=True)

    def token_text(self, token_id: int) -> str:
        """One token's own text, special tokens included; for tables and reports."""
        return self._backend.decode([int(token_id)], skip_special_tokens=False)


def _digest(*parts: str) -> str:
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Read a tokenizer from a Hugging Face folder.

    Raises:
        ConfigError: a file is missing or damaged, or no end-of-sequence token is named.
    """
    folder = Path(folder)
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{folder}: no tokenizer.json; give a Hugging Face model folder")
    try:
        backend = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as e:  # the library raises bare Exception
        raise ConfigError(f"{path}: not a tokenizer file: {e}") from e
    named = _read_json(folder / "tokenizer_config.json")
    facts: dict[str, Any] = {}
    for name in SPECIAL_TOKEN_NAMES:
        token = named.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if text is not None:
            facts[name] = text
    facts["eos"] = _eos_ids(folder, backend, facts.get("eos_token"))
    pad = backend.token_to_id(facts["pad_token"]) if "pad_token" in facts else None
    facts["pad"] = facts["eos"][0] if pad is None else pad
    return Tokenizer(backend, _template(folder, named), facts)


def _eos_ids(folder: Path, backend: tokenizers.Tokenizer, text: str | None) -> list[int]:
    """End ids from generation_config.json, config.json and the named eos token, all of them."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = _read_json(folder / name).get("eos_token_id")
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    if text is not None and (named := backend.token_to_id(text)) is not None:
        found.add(named)
    if not found:
        raise ConfigError(
            f"{folder}: no end-of-sequence token; name eos_token in tokenizer_config.json"
        )
    return sorted(found)


def _template(folder: Path, named: dict[str, Any]) -> str | None:
    separate = folder / "chat_template.jinja"
    if separate.is_file():
        return separate.read_text(encoding="utf-8")
    template = named.get("chat_template")
    if isinstance(template, list):  # several by name; "default" is the one for plain chat
        template = {t["name"]: t["template"] for t in template}.get("default")
    return template


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ConfigError(f"{path}: cannot be read as JSON: {e}") from e


def write_char_tokenizer(folder: str | Path, alphabet: str, *, eos: str) -> None:
    """Write a tokenizer of one token per character; id 0 is padding, ``eos`` ends a response."""
    if eos not in alphabet or len(set(alphabet)) != len(alphabet):
        raise ValueError(f"alphabet {alphabet!r} must hold each character once, eos {eos!r} too")
    pad = "<pad>"
    vocabulary = {pad: 0} | {char: i + 1 for i, char in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    # The end token is an ordinary character: it is seen in the text, so answers can hold it.
    backend.add_special_tokens([AddedToken(pad, special=True, normalized=False)])
    write_tokenizer(folder, backend, {"eos_token": eos, "pad_token": pad})


def write_tokenizer(
    folder: str | Path, backend: tokenizers.Tokenizer, named: dict[str, Any]
) -> None:
    """Write both tokenizer files; ``named`` holds special tokens by name, maybe a template."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(backend.to_str(), encoding="utf-8")
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", **named}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")
