"""Shape of a decoder of the Llama family (Llama, SmolLM2, Qwen2, Qwen3, Mistral).

One frozen ``ModelConfig`` is read by trainer and engine alike; it is hashable, so jitted functions
take it as a static argument. ``from_hf`` and ``to_hf`` translate Hugging Face ``config.json``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from infra.config import nearest
from infra.contracts.errors import ConfigError

QUERY_KEY_NORM = ("qwen3",)
QUERY_KEY_BIAS = ("qwen2",)
FAMILIES = ("llama", "mistral", *QUERY_KEY_BIAS, *QUERY_KEY_NORM)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Llama 3's stretching of the slow rotary frequencies (``rope_type: llama3``)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Everything that decides parameter shapes and the forward pass."""

    layers: int
    dim: int
    """Width of the residual stream."""
    heads: int
    kv_heads: int
    """Each key/value head serves ``heads // kv_heads`` query heads (grouped-query attention)."""
    head_dim: int
    ffn: int
    """Width of the SwiGLU hidden layer."""
    vocab: int
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    eps: float = 1e-5
    """Added to the mean square in RMSNorm."""
    tied: bool = True
    """The head is the embedding matrix."""
    qkv_bias: bool = False
    qk_norm: bool = False
    """RMSNorm on every query and key head (Qwen3)."""
    max_len: int = 2048
    """Longest sequence the model was made for."""
    family: str = "llama"

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads = {self.heads} is not a multiple of kv_heads = {self.kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim = {self.head_dim} must be even: rotary pairs")


PRESETS: dict[str, ModelConfig] = {
    "smollm2-135m": ModelConfig(
        layers=30,
        dim=576,
        heads=9,
        kv_heads=3,
        head_dim=64,
        ffn=1536,
        vocab=49152,
        rope_theta=100_000.0,
        max_len=8192,
    ),
    # 0.33 M parameters over the 14 characters of the addition task; learns from nothing in minutes.
    "tiny": ModelConfig(
        layers=3, dim=96, heads=4, kv_heads=4, head_dim=24, ffn=256, vocab=14, max_len=64
    ),
}


def preset(name: str) -> ModelConfig:
    """Return a named configuration. Raises ``ConfigError`` that names the nearest."""
    if name not in PRESETS:
        raise ConfigError(f"model preset '{name}' is not known; {nearest(name, PRESETS)}")
    return PRESETS[name]


def from_hf(facts: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """Read a Hugging Face ``config.json``. Raises ``ConfigError`` for another architecture."""
    family = facts.get("model_type")
    if family not in FAMILIES:
        raise ConfigError(
            f"{where}: model_type '{family}' is not supported; supported: {', '.join(FAMILIES)}"
        )
    window = facts.get("sliding_window") if facts.get("use_sliding_window", True) else None
    refused = {
        "mlp_bias": facts.get("mlp_bias", False),
        "hidden_act": facts.get("hidden_act", "silu") != "silu",
        "sliding_window": family != "llama" and window is not None,
        "attention_bias": family == "llama" and facts.get("attention_bias", False),
    }
    if any(refused.values()):
        names = ", ".join(f"{k} = {facts[k]!r}" for k, bad in refused.items() if bad)
        raise ConfigError(f"{where}: {names} is not supported; use a model without it")
    rope = facts.get("rope_parameters") or facts.get("rope_scaling") or {}
    heads = facts["num_attention_heads"]
    return ModelConfig(
        layers=facts["num_hidden_layers"],
        dim=facts["hidden_size"],
        heads=heads,
        kv_heads=facts.get("num_key_value_heads") or heads,
        head_dim=facts.get("head_dim") or facts["hidden_size"] // heads,
        ffn=facts["intermediate_size"],
        vocab=facts["vocab_size"],
        rope_theta=float(facts.get("rope_theta") or rope.get("rope_theta") or 10_000.0),
        rope_scaling=_scaling(rope, where),
        eps=float(facts.get("rms_norm_eps", 1e-6)),
        tied=bool(facts.get("tie_word_embeddings", False)),
        qkv_bias=family in QUERY_KEY_BIAS,
        qk_norm=family in QUERY_KEY_NORM,
        max_len=facts.get("max_position_embeddings", 2048),
        family=family,
    )


def _scaling(rope: Mapping[str, Any], where: str) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind != "llama3":
        raise ConfigError(
            f"{where}: rope_type '{kind}' is not supported; supported: default, llama3"
        )
    return RopeScaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_len=int(rope["original_max_position_embeddings"]),
    )


def to_hf(config: ModelConfig, *, bos: int | None, eos: tuple[int, ...]) -> dict[str, Any]:
    """Write what ``from_hf`` and transformers read."""
    names = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    scaling = config.rope_scaling
    facts: dict[str, Any] = {
        "architectures": [f"{names[config.family]}ForCausalLM"],
        "model_type": config.family,
        "num_hidden_layers": config.layers,
        "hidden_size": config.dim,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn,
        "vocab_size": config.vocab,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.eps,
        "tie_word_embeddings": config.tied,
        "max_position_embeddings": config.max_len,
        "hidden_act": "silu",
        "bos_token_id": bos,
        "eos_token_id": list(eos) if len(eos) != 1 else eos[0],
        "dtype": "float32",
    }
    if config.family == "mistral":
        facts["sliding_window"] = None
    if scaling is not None:
        facts["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_len,
        }
    return facts


def config_facts(config: ModelConfig) -> dict[str, object]:
    """The configuration as plain values, for weight manifests."""
    return dataclasses.asdict(config)
