"""A Llama-family GGUF file into Hugging Face's names, layout and tokenizer.

GGUF stores the rows of q and k in interleaved pairs; Hugging Face (and this model) rotates halves,
so each head's rows are put back. Everything else keeps its layout: matrices are (out, in).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from infra.contracts.errors import ConfigError
from trainer.model.config import ModelConfig

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NEEDED = (
    "block_count",
    "embedding_length",
    "attention.head_count",
    "attention.head_count_kv",
    "feed_forward_length",
    "vocab_size",
    "context_length",
    "rope.freq_base",
    "attention.layer_norm_rms_epsilon",
)
_IMPLIED = ("rope.dimension_count",)
"""Of a llama always ``head_dim``, which follows from the rest."""
CONTROL_TOKEN = 3
"""GGUF's token type of special tokens."""


class GgufModel:
    """One opened file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reader = gguf.GGUFReader(path)
        if (arch := self._fact("general.architecture")) != "llama":
            raise ConfigError(f"{path}: GGUF architecture '{arch}' is not supported; give a llama")

    def _fact(self, name: str) -> Any:
        field = self._reader.fields.get(name)
        return None if field is None else field.contents()

    def config(self) -> ModelConfig:
        """The shape of the model."""
        known = {f"llama.{name}" for name in (*_NEEDED, *_IMPLIED)}
        for name in self._reader.fields:
            if name.startswith("llama.") and name not in known:
                raise ConfigError(
                    f"{self._path}: {name} = {self._fact(name)!r} is not supported; "
                    "give the model as a Hugging Face folder"
                )
        facts = {name: self._fact(f"llama.{name}") for name in _NEEDED}
        heads, dim = facts["attention.head_count"], facts["embedding_length"]
        return ModelConfig(
            layers=facts["block_count"],
            dim=dim,
            heads=heads,
            kv_heads=facts["attention.head_count_kv"],
            head_dim=dim // heads,
            ffn=facts["feed_forward_length"],
            vocab=facts["vocab_size"],
            rope_theta=float(facts["rope.freq_base"]),
            # stored as float32; five digits are what its authors wrote (1e-05)
            eps=float(f"{facts['attention.layer_norm_rms_epsilon']:.5g}"),
            tied=all(t.name != "output.weight" for t in self._reader.tensors),
            max_len=facts["context_length"],
        )

    def arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        """(Hugging Face name, float32 array) of every tensor, dequantized."""
        config = self.config()
        for tensor in self._reader.tensors:
            data = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
            name, _, rest = tensor.name.partition(".")
            if name == "blk":
                index, _, rest = rest.partition(".")
                part, _, suffix = rest.partition(".")
                if part in ("attn_q", "attn_k"):
                    data = _halves(data, config.head_dim)
                yield f"model.layers.{index}.{_LAYER[part]}.{suffix}", data
            else:
                yield f"{_TOP[name]}.{rest}", data

    def tokenizer(self) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
        """The byte-level BPE tokenizer, and the named tokens and template for its config file."""
        if (kind := self._fact("tokenizer.ggml.pre")) != "smollm":
            raise ConfigError(
                f"{self._path}: pre-tokenizer '{kind}' is not supported; "
                "give the model as a Hugging Face folder with a tokenizer.json"
            )
        tokens = self._fact("tokenizer.ggml.tokens")
        types = self._fact("tokenizer.ggml.token_type")
        merges = [tuple(m.split(" ")) for m in self._fact("tokenizer.ggml.merges")]
        backend = tokenizers.Tokenizer(
            models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges)
        )
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens(
            [
                AddedToken(text, special=True, normalized=False)
                for text, kind in zip(tokens, types, strict=True)
                if kind == CONTROL_TOKEN
            ]
        )
        ids = {
            "bos_token": "bos",
            "eos_token": "eos",
            "unk_token": "unknown",
            "pad_token": "padding",
        }
        named = {
            name: tokens[token_id]
            for name, key in ids.items()
            if (token_id := self._fact(f"tokenizer.ggml.{key}_token_id")) is not None
        }
        return backend, {**named, "chat_template": self._fact("tokenizer.chat_template")}


def _halves(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Reorder each head's rows from interleaved pairs (x0 y0 x1 y1 ..) to halves (x.. y..)."""
    pairs = rows.reshape(-1, head_dim // 2, 2, rows.shape[-1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)
