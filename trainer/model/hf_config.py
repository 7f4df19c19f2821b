"""Hugging Face's ``config.json`` into ``ModelConfig`` and back, family by family.

Every key of the file is either read here, or listed as one that changes nothing, or an error that
names it: a model that is loaded computes what its authors meant.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infra.contracts.errors import ConfigError
from trainer.model.config import LinearScaling, ModelConfig, RopeScaling
from trainer.model.hf_families import COMMON, FAMILIES, SILENT, Family

_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_ROPE_TYPES = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
    ),
}  # fmt: skip
SLIDING, FULL = "sliding_attention", "full_attention"


def from_hf(facts: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """Read a Hugging Face ``config.json``.

    Raises:
        ConfigError: another architecture, or a key that this code does not know and that is
            neither null nor false.
        KeyError: a size is missing.
    """
    kind = facts.get("model_type")
    if kind not in FAMILIES:
        raise ConfigError(
            f"{where}: model_type '{kind}' is not supported; supported: {', '.join(FAMILIES)}"
        )
    family = FAMILIES[kind]
    _refuse_unknown(facts, family, where)
    heads, dim = facts["num_attention_heads"], facts["hidden_size"]
    windows = _window_layers(facts, family, where)
    rope, window_rope = _ropes(facts, family, where)
    gemma = family.gemma
    return ModelConfig(
        layers=facts["num_hidden_layers"],
        dim=dim,
        heads=heads,
        kv_heads=facts.get("num_key_value_heads") or heads,
        head_dim=facts.get("head_dim") or _head_dim(facts, family),
        ffn=facts["intermediate_size"],
        vocab=facts["vocab_size"],
        rope_theta=float(rope.get("rope_theta") or facts.get("rope_theta") or family.rope_theta),
        rope_scaling=_scaling(rope, where),
        eps=float(facts.get("rms_norm_eps", 1e-6)),
        tied=bool(facts.get("tie_word_embeddings", family.tied)),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        activation=_activation(facts, family, where),
        norm_offset=1.0 if gemma else 0.0,
        post_norms=gemma,
        embed_scale=dim**0.5 if gemma else 1.0,
        query_dim=float(facts["query_pre_attn_scalar"]) if gemma else None,
        attn_softcap=_cap(facts, "attn_logit_softcapping", family.attn_softcap),
        final_softcap=_cap(facts, "final_logit_softcapping", family.final_softcap),
        window=facts["sliding_window"] if windows else None,
        window_layers=windows,
        window_rope_theta=window_rope if windows else None,
        max_len=facts.get("max_position_embeddings", 2048),
        family=kind,
    )


def _refuse_unknown(facts: Mapping[str, Any], family: Family, where: str) -> None:
    """Name an option that is not implemented, of this family or of one never heard of."""
    for key, value in facts.items():
        known = key in COMMON or key in family.reads or key in SILENT
        if not known and value is not None and value is not False:
            raise ConfigError(
                f"{where}: {key} = {value!r} is not supported: it may change what the model "
                "computes; use a model without it, or set it to null if it changes nothing"
            )


def _head_dim(facts: Mapping[str, Any], family: Family) -> int:
    if family.gemma or facts["model_type"] == "qwen3":
        raise KeyError("head_dim")  # these families choose it freely
    return facts["hidden_size"] // facts["num_attention_heads"]


def _activation(facts: Mapping[str, Any], family: Family, where: str) -> str:
    default = "gelu_pytorch_tanh" if family.gemma else "silu"
    key = "hidden_activation" if family.gemma else "hidden_act"
    name = facts.get(key) or default
    if name not in _ACTIVATIONS:
        raise ConfigError(
            f"{where}: {key} = {name!r} is not supported; supported: {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def _cap(facts: Mapping[str, Any], key: str, default: float | None) -> float | None:
    """Only an absent key means the family's default: null switches the cap off."""
    value = facts.get(key, default)
    return None if value is None else float(value)


def _window_layers(facts: Mapping[str, Any], family: Family, where: str) -> tuple[int, ...]:
    """Indices of the layers that see a window only."""
    layers, types = range(facts["num_hidden_layers"]), facts.get("layer_types")
    if types is not None:
        if len(types) != len(layers) or not {SLIDING, FULL}.issuperset(types):
            raise ConfigError(
                f"{where}: layer_types = {types!r} is not supported; give one of {SLIDING}, {FULL} "
                f"for each of {len(layers)} layers"
            )
        found = tuple(i for i in layers if types[i] == SLIDING)
        if found and "use_sliding_window" in family.reads and not facts.get("use_sliding_window"):
            raise ConfigError(
                f"{where}: layer_types names layers with a window, use_sliding_window does not; "
                "make them agree"
            )
        return found
    if facts.get("sliding_window") is None:
        return ()
    if "use_sliding_window" in family.reads:
        first = facts.get("max_window_layers", 28)
        return tuple(layers)[first:] if facts.get("use_sliding_window") else ()
    every = facts.get("_sliding_window_pattern") or facts.get("sliding_window_pattern")
    every = every or family.window_every
    return tuple(i for i in layers if not every or (i + 1) % every)


def _ropes(
    facts: Mapping[str, Any], family: Family, where: str
) -> tuple[Mapping[str, Any], float | None]:
    """The rotary settings of full layers, and the base of layers with a window if of its own."""
    given = [facts[k] for k in ("rope_parameters", "rope_scaling") if facts.get(k)]
    if len(given) == 2 and given[0] != given[1]:
        raise ConfigError(f"{where}: rope_parameters and rope_scaling differ; keep one of them")
    rope = given[0] if given else {}
    base = family.window_rope_theta
    if base is None or not {SLIDING, FULL}.intersection(rope):
        return rope, base and float(facts.get("rope_local_base_freq") or base)
    windowed = rope.get(SLIDING) or {}
    if set(rope) - {SLIDING, FULL} or _scaling(windowed, where) is not None:
        raise ConfigError(
            f"{where}: rope_parameters = {dict(rope)!r} is not supported; give {FULL} and "
            f"{SLIDING}, the latter of rope_type 'default'"
        )
    return rope.get(FULL) or {}, float(windowed.get("rope_theta") or base)


def _scaling(rope: Mapping[str, Any], where: str) -> RopeScaling | LinearScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in _ROPE_TYPES:
        raise ConfigError(
            f"{where}: rope_type '{kind}' is not supported; supported: {', '.join(_ROPE_TYPES)}"
        )
    known = {"rope_theta", "rope_type", "type", *_ROPE_TYPES[kind]}
    for key, value in rope.items():
        whole = key == "partial_rotary_factor" and value == 1.0
        if value is not None and key not in known and not whole:
            raise ConfigError(
                f"{where}: {key} = {value!r} with rope_type '{kind}' is not supported; "
                "use a model without it"
            )
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(factor=float(rope["factor"]))
    return RopeScaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_len=int(rope["original_max_position_embeddings"]),
    )


def to_hf(config: ModelConfig, *, bos: int | None, eos: tuple[int, ...]) -> dict[str, Any]:
    """Write what ``from_hf`` and transformers read.

    Raises:
        ValueError: no family computes what this configuration says.
    """
    family = FAMILIES[config.family]
    activation = {ours: theirs for theirs, ours in _ACTIVATIONS.items()}[config.activation]
    facts: dict[str, Any] = {
        "architectures": [f"{family.architecture}ForCausalLM"],
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
        "hidden_activation" if family.gemma else "hidden_act": activation,
        "bos_token_id": bos,
        "eos_token_id": list(eos) if len(eos) > 1 else (eos[0] if eos else None),
        "dtype": "float32",
    }
    if family.gemma:
        facts["query_pre_attn_scalar"] = config.query_dim
        facts["attn_logit_softcapping"] = config.attn_softcap
        facts["final_logit_softcapping"] = config.final_softcap
        if config.window_rope_theta is not None:
            facts["rope_local_base_freq"] = config.window_rope_theta
    if "sliding_window" in family.reads:
        facts["sliding_window"] = config.window
    if family.gemma or (config.window_layers and config.family != "mistral"):
        facts["layer_types"] = [SLIDING if sliding else FULL for sliding in config.sliding]
    if config.window_layers and "use_sliding_window" in family.reads:
        facts |= {"use_sliding_window": True, "max_window_layers": config.window_layers[0]}
    if config.rope_scaling is not None:
        facts["rope_scaling"] = _scaling_facts(config.rope_scaling)
    if (read := from_hf(facts)) != config:
        raise ValueError(f"no {config.family} model is {config}: it would be read as {read}")
    return facts


def _scaling_facts(scaling: RopeScaling | LinearScaling) -> dict[str, Any]:
    if isinstance(scaling, LinearScaling):
        return {"rope_type": "linear", "factor": scaling.factor}
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_len,
    }
