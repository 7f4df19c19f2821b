"""The sampler of tunix: static batches; it compiles for every shape, so time a repeat."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
from pathlib import Path

import jax
import jax.numpy as jnp
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.models.llama3.model import ModelConfig
from tunix.models.llama3.params import create_model_from_safe_tensors

from benchmarks.peers.peer_loop import Answer, batches, serve


class Ids:
    """In place of a tokenizer: prompts are ids already, written in decimal."""

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        return " ".join(str(int(i)) for i in ids)

    def bos_id(self) -> int:
        return 0

    def eos_id(self) -> int:
        return -1  # never drawn

    def pad_id(self) -> int:
        return 0  # SmolLM2's <|endoftext|>, in no prompt of ours


def load(args: argparse.Namespace) -> tuple[str, Answer]:
    facts = json.loads((Path(args.model) / "config.json").read_text())
    config = ModelConfig(
        num_layers=facts["num_hidden_layers"],
        vocab_size=facts["vocab_size"],
        embed_dim=facts["hidden_size"],
        hidden_dim=facts["intermediate_size"],
        num_heads=facts["num_attention_heads"],
        head_dim=facts["head_dim"],
        num_kv_heads=facts["num_key_value_heads"],
        rope_theta=int(facts["rope_theta"]),
        norm_eps=facts["rms_norm_eps"],
        weight_tying=facts["tie_word_embeddings"],
    )
    model = create_model_from_safe_tensors(args.model, config, dtype=jnp.dtype(args.dtype))
    cache = CacheConfig(args.max_len, config.num_layers, config.num_kv_heads, config.head_dim)
    sampler = Sampler(model, Ids(), cache)

    def answer(prompts: list[list[int]], lengths: list[list[int]], slots: int) -> int:
        tokens = 0
        for rows in batches(prompts, lengths, slots):
            steps = max(n for _, n in rows)
            found = sampler(
                [" ".join(str(i) for i in prompt) for prompt, _ in rows],
                max_generation_steps=steps,
                max_prompt_length=max(len(prompt) for prompt, _ in rows),
                temperature=1.0,
                top_p=1.0,
                seed=0,
            )
            assert len(found.tokens) == len(rows)
            tokens += sum(n for _, n in rows)
        return tokens

    version = importlib.metadata.version("google-tunix")
    return f"tunix {version}, jax {jax.__version__}", answer


if __name__ == "__main__":
    serve(load)
