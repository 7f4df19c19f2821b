"""Writes ``tests/golden/families/*.npz``: tiny random models of every family, with their logits.

    python -m venv V && V/bin/pip install transformers==5.24.0 torch==2.15.0
    V/bin/python tests/trainer/model/make_golden_families.py tests/golden/families

A file holds ``config`` (the bytes of config.json as transformers writes it), every tensor under its
Hugging Face name, ``tokens`` int32[2,20] and ``logits`` float32[2,20,V] of eager attention in
float32. Windows, caps and rotary scalings are so small that within 20 tokens each of them matters.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

SIZES = {
    "num_hidden_layers": 3, "hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 40, "vocab_size": 40, "max_position_embeddings": 64,
    "rope_theta": 100.0, "rms_norm_eps": 1e-5,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "factor": 4.0}
GEMMA = {"sliding_window": 5, "query_pre_attn_scalar": 5}
CASES = {
    "llama": ("Llama", {}),
    "llama-rope-llama3": ("Llama", {"rope_scaling": LLAMA3, "tie_word_embeddings": True}),
    "llama-rope-linear": ("Llama", {"rope_scaling": LINEAR}),
    "mistral": ("Mistral", {"sliding_window": 5}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 12}),
    "gemma2": (
        "Gemma2",
        {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": (
        "Gemma3",
        {
            **GEMMA,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_local_base_freq": 7.0,
            "rope_scaling": LINEAR,
        },
    ),
}


def make(name: str, family: str, facts: dict, folder: Path) -> None:
    text = "Text" if family == "Gemma3" else ""
    config = getattr(transformers, f"{family}{text}Config")(**(SIZES | facts))
    config._attn_implementation = "eager"
    torch.manual_seed(7)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, leaf in model.named_parameters():
            draw = torch.randn(leaf.shape)
            if leaf.ndim == 2:
                leaf.copy_(draw * (1.0 if "embed" in key else 1.5 * leaf.shape[1] ** -0.5))
            elif key.endswith("norm.weight"):
                leaf.copy_(0.3 * draw + (0.0 if family.startswith("Gemma") else 1.0))
            else:
                leaf.copy_(0.5 * draw)
        tokens = torch.randint(0, config.vocab_size, (2, 20))
        logits = model(tokens).logits
    with tempfile.TemporaryDirectory() as scratch:
        config.save_pretrained(scratch)
        written = (Path(scratch) / "config.json").read_bytes()
    tied = json.loads(written).get("tie_word_embeddings", config.tie_word_embeddings)
    arrays = {
        key: leaf.numpy()
        for key, leaf in model.state_dict().items()
        if not (tied and key == "lm_head.weight")
    }
    np.savez_compressed(
        folder / f"{name}.npz",
        config=np.frombuffer(written, np.uint8),
        tokens=tokens.numpy().astype(np.int32),
        logits=logits.float().numpy(),
        **arrays,
    )
    print(name, f"std of the logits {logits.std():.2f}, {len(arrays)} tensors")


if __name__ == "__main__":
    for case, (of, changes) in CASES.items():
        make(case, of, changes, Path(sys.argv[1]))
