"""The families of decoders: which keys of ``config.json`` each reads, and what silence means."""

from __future__ import annotations

from dataclasses import dataclass

COMMON = frozenset({
    "head_dim", "hidden_size", "intermediate_size", "max_position_embeddings", "model_type",
    "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps",
    "rope_parameters", "rope_scaling", "rope_theta", "tie_word_embeddings", "vocab_size",
})  # fmt: skip
"""Keys that every family reads."""
SILENT = frozenset({
    "_attn_implementation", "_name_or_path", "architectures", "attention_dropout", "bos_token_id",
    "cache_implementation", "do_sample", "dtype", "eos_token_id", "hybrid_kvcache_attention",
    "id2label", "initializer_range", "is_llama_config", "label2id", "max_length",
    "max_window_layers", "output_attentions", "output_hidden_states", "pad_token_id",
    "pretraining_tp", "return_dict", "temperature", "tokenizer_class", "top_k", "top_p",
    "torch_dtype", "transformers.js_config", "transformers_version", "unk_token_id",
    "unsloth_fixed", "use_cache",
})  # fmt: skip
"""Bookkeeping, training and generation: nothing here changes a forward pass. (``max_window_layers``
does only with ``use_sliding_window``, under which it is read.)"""
_WINDOWS = frozenset({"layer_types", "sliding_window"})
_GEMMA = _WINDOWS | {
    "_sliding_window_pattern", "attn_logit_softcapping", "final_logit_softcapping", "hidden_act",
    "hidden_activation", "query_pre_attn_scalar", "sliding_window_pattern",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What a ``model_type`` reads, and what it means where ``config.json`` is silent."""

    architecture: str
    reads: frozenset[str]
    """Beside ``COMMON``."""
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    gemma: bool = False
    """Scaled embeddings, norms that store the scale less one, norms after, gelu."""
    attn_softcap: float | None = None
    final_softcap: float | None = None
    window_every: int = 1
    """Layer i has no window if i + 1 is a multiple; 1: none has, 0: all have."""
    rope_theta: float = 10_000.0
    window_rope_theta: float | None = None


FAMILIES = {
    "llama": Family(architecture="Llama", reads=frozenset({"hidden_act"})),
    "mistral": Family(
        architecture="Mistral", reads=frozenset({"hidden_act", "sliding_window"}), window_every=0
    ),
    "qwen2": Family(
        architecture="Qwen2", reads=_WINDOWS | {"hidden_act", "use_sliding_window"}, qkv_bias=True
    ),
    "qwen3": Family(
        architecture="Qwen3", reads=_WINDOWS | {"hidden_act", "use_sliding_window"}, qk_norm=True
    ),
    "gemma2": Family(
        architecture="Gemma2",
        reads=_GEMMA,
        tied=True,
        gemma=True,
        attn_softcap=50.0,
        final_softcap=30.0,
        window_every=2,
    ),
    "gemma3_text": Family(
        architecture="Gemma3",
        reads=_GEMMA | {"rope_local_base_freq"},
        tied=True,
        gemma=True,
        qk_norm=True,
        window_every=6,
        rope_theta=1_000_000.0,
        window_rope_theta=10_000.0,
    ),
}
