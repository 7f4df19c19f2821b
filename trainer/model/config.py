"""Shape and arithmetic of a decoder: Llama, Mistral, Qwen 2 and 3, Gemma 2 and 3 (text).

One frozen ``ModelConfig`` is read by trainer and engine alike; it is hashable, so jitted functions
take it as a static argument. ``trainer.model.hf_config`` translates Hugging Face ``config.json``.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from infra.config import nearest
from infra.contracts.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Llama 3's stretching of the slow rotary frequencies (``rope_type: llama3``)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """Every rotary frequency divided by ``factor`` (``rope_type: linear``)."""

    factor: float


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
    """Width of the gated MLP's hidden layer."""
    vocab: int
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | LinearScaling | None = None
    eps: float = 1e-5
    """Added to the mean square in RMSNorm."""
    tied: bool = True
    """The head is the embedding matrix."""
    qkv_bias: bool = False
    qk_norm: bool = False
    """RMSNorm on every query and key head (Qwen3, Gemma 3)."""
    activation: str = "silu"
    """Of the MLP's gate: silu, or gelu_tanh (Gemma)."""
    norm_offset: float = 0.0
    """RMSNorm multiplies by this plus the stored scale (Gemma: 1)."""
    post_norms: bool = False
    """A norm also after attention and after the MLP, before each is added (Gemma)."""
    embed_scale: float = 1.0
    """Embeddings are multiplied by it (Gemma: the root of ``dim``)."""
    query_dim: float | None = None
    """Attention scores are divided by its root; None: ``head_dim``."""
    attn_softcap: float | None = None
    """Attention scores go through ``cap * tanh(score / cap)`` (Gemma 2)."""
    final_softcap: float | None = None
    """The same for logits (Gemma 2)."""
    window: int | None = None
    """Tokens that ``window_layers`` look at, the own one among them."""
    window_layers: tuple[int, ...] = ()
    window_rope_theta: float | None = None
    """Rotary base of ``window_layers``, never scaled (Gemma 3); None: as everywhere."""
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
        if self.window_layers and not (self.window and self.window > 0):
            raise ValueError(f"window = {self.window} must be positive: layers have a window")

    @property
    def query_scale(self) -> float:
        """What attention scores are multiplied by."""
        return (self.query_dim or self.head_dim) ** -0.5

    @property
    def sliding(self) -> tuple[bool, ...]:
        """Of every layer, whether it has a window."""
        return tuple(i in self.window_layers for i in range(self.layers))


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


def config_facts(config: ModelConfig) -> dict[str, object]:
    """The configuration as plain values, for weight manifests."""
    return dataclasses.asdict(config)
