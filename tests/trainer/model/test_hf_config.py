"""config.json: real files of every family are read, what is not implemented is named."""

import dataclasses

import pytest

from infra.contracts.errors import ConfigError
from trainer.model.config import LinearScaling, RopeScaling, preset
from trainer.model.hf_config import from_hf, to_hf
from trainer.model.hf_families import FAMILIES

SIZES = {
    "num_hidden_layers": 12, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": 100, "rms_norm_eps": 1e-6, "head_dim": 32,
    "max_position_embeddings": 512, "architectures": ["X"], "torch_dtype": "bfloat16",
    "transformers_version": "4.40.0", "use_cache": True, "initializer_range": 0.02,
    "attention_dropout": 0.0, "bos_token_id": 2, "eos_token_id": [1, 106], "pad_token_id": 0,
}  # fmt: skip
LLAMA3 = {
    "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192, "rope_type": "llama3",
}  # fmt: skip
# The keys of published files, in the forms of transformers 4.37 to 4.50.
LLAMA = SIZES | {
    "model_type": "llama", "attention_bias": False, "hidden_act": "silu", "mlp_bias": False,
    "pretraining_tp": 1, "rope_scaling": LLAMA3, "rope_theta": 500000.0,
    "tie_word_embeddings": True,
}  # fmt: skip
MISTRAL = SIZES | {
    "model_type": "mistral", "hidden_act": "silu", "sliding_window": 4096, "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}  # fmt: skip
QWEN2 = SIZES | {
    "model_type": "qwen2", "hidden_act": "silu", "max_window_layers": 8, "rope_theta": 1000000.0,
    "sliding_window": 32768, "tie_word_embeddings": True, "use_mrope": False,
    "use_sliding_window": False,
}  # fmt: skip
QWEN3 = SIZES | {
    "model_type": "qwen3", "attention_bias": False, "hidden_act": "silu", "max_window_layers": 12,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
    "tie_word_embeddings": True, "use_sliding_window": False,
}  # fmt: skip
GEMMA2 = SIZES | {
    "model_type": "gemma2", "attention_bias": False, "attn_logit_softcapping": 50.0,
    "cache_implementation": "hybrid", "final_logit_softcapping": 30.0,
    "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 144, "rope_theta": 10000.0, "sliding_window": 4096,
}  # fmt: skip
GEMMA3 = SIZES | {
    "model_type": "gemma3_text", "attention_bias": False, "attn_logit_softcapping": None,
    "cache_implementation": "hybrid", "final_logit_softcapping": None,
    "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256,
    "rope_local_base_freq": 10000, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6,
}  # fmt: skip
ALL = {facts["model_type"]: facts for facts in (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA2, GEMMA3)}


def test_every_family_is_here():
    assert list(ALL) == list(FAMILIES)


@pytest.mark.parametrize("name", ["tiny", "smollm2-135m"])
def test_presets_round_trip(name):
    assert from_hf(to_hf(preset(name), bos=1, eos=(2,))) == preset(name)


@pytest.mark.parametrize("name", ALL)
def test_published_forms_round_trip(name):
    config = from_hf(ALL[name])
    written = to_hf(config, bos=2, eos=(1, 106))
    assert from_hf(written) == config
    assert (written["bos_token_id"], written["eos_token_id"]) == (2, [1, 106])


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (
            LLAMA,
            {
                "tied": True,
                "window_layers": (),
                "rope_theta": 5e5,
                "rope_scaling": RopeScaling(
                    factor=32, low_freq_factor=1, high_freq_factor=4, original_max_len=8192
                ),
            },
        ),
        (MISTRAL, {"tied": False, "window": 4096, "window_layers": tuple(range(12))}),
        (QWEN2, {"qkv_bias": True, "qk_norm": False, "window": None, "window_layers": ()}),
        (
            QWEN2 | {"use_sliding_window": True},
            {"window": 32768, "window_layers": (8, 9, 10, 11)},
        ),
        (QWEN3, {"qkv_bias": False, "qk_norm": True, "head_dim": 32}),
        (
            GEMMA2,
            {
                "tied": True,
                "window": 4096,
                "window_layers": (0, 2, 4, 6, 8, 10),
                "window_rope_theta": None,
                "attn_softcap": 50.0,
                "final_softcap": 30.0,
                "query_dim": 144.0,
                "embed_scale": 8.0,
                "norm_offset": 1.0,
                "qk_norm": False,
            },
        ),
        (
            GEMMA3,
            {
                "tied": True,
                "window": 512,
                "window_layers": (0, 1, 2, 3, 4, 6, 7, 8, 9, 10),
                "window_rope_theta": 1e4,
                "rope_theta": 1e6,
                "rope_scaling": LinearScaling(factor=8),
                "attn_softcap": None,
                "qk_norm": True,
                "activation": "gelu_tanh",
            },
        ),
    ],
)
def test_published_forms_mean(facts, expected):
    config = from_hf(facts)
    assert {name: getattr(config, name) for name in expected} == expected


def test_old_and_new_forms_of_gemma3_agree():
    new = {k: v for k, v in GEMMA3.items() if not k.startswith(("rope", "sliding_window_p"))}
    new["rope_parameters"] = {
        "full_attention": {"factor": 8.0, "rope_theta": 1000000, "rope_type": "linear"},
        "sliding_attention": {"rope_theta": 10000, "rope_type": "default"},
    }
    new["layer_types"] = (["sliding_attention"] * 5 + ["full_attention"]) * 2
    assert from_hf(new) == from_hf(GEMMA3)


def test_an_absent_cap_is_the_familys_and_null_is_none():
    absent = {k: v for k, v in GEMMA2.items() if k != "attn_logit_softcapping"}
    assert from_hf(absent).attn_softcap == 50.0
    assert from_hf(GEMMA2 | {"attn_logit_softcapping": None}).attn_softcap is None


CHUNKED = {"layer_types": ["chunked_attention"] * 12}
YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    ("facts", "change", "message"),
    [
        (LLAMA, {"model_type": "gpt2"}, "model_type 'gpt2' is not supported"),
        (LLAMA, {"model_type": "gemma3"}, "model_type 'gemma3' is not supported"),
        (LLAMA, {"model_type": "qwen3_moe"}, "model_type 'qwen3_moe'"),
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        (GEMMA2, {"hidden_activation": "gelu"}, "hidden_activation = 'gelu'"),
        (LLAMA, {"attention_bias": True}, "attention_bias = True"),
        (LLAMA, {"mlp_bias": True}, "mlp_bias = True"),
        (LLAMA, {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        (LLAMA, {"sliding_window": 4096}, "sliding_window = 4096"),
        (LLAMA, {"num_experts": 8}, "num_experts = 8"),
        (LLAMA, {"num_local_experts": 8}, "num_local_experts = 8"),
        (LLAMA, {"attention_sinks": True}, "attention_sinks = True"),
        (LLAMA, {"quantization_config": {"bits": 4}}, "quantization_config"),
        (LLAMA, {"logit_scale": 0.5}, "logit_scale = 0.5"),
        (LLAMA, {"logit_scale": 0}, "logit_scale = 0"),
        (GEMMA3, {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (GEMMA2, {"rope_local_base_freq": 1e4}, "rope_local_base_freq"),
        (QWEN2, {"rope_scaling": YARN}, "rope_type 'yarn'"),
        (QWEN2, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
        (QWEN2, {"rope_scaling": YARN, "rope_parameters": LLAMA3}, "differ"),
        (QWEN2, {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        (QWEN2, {"rope_scaling": LLAMA3 | {"beta_fast": 32}}, "beta_fast = 32"),
        (GEMMA3, CHUNKED, "layer_types"),
        (GEMMA3, {"layer_types": ["full_attention"]}, "for each of 12 layers"),
        (QWEN3, {"layer_types": ["sliding_attention"] * 12}, "make them agree"),
        (
            GEMMA3,
            {"rope_scaling": None, "rope_parameters": {"sliding_attention": YARN}},
            "rope_type 'yarn'",
        ),
        (
            GEMMA3,
            {"rope_scaling": None, "rope_parameters": {"sliding_attention": LLAMA3}},
            "the latter of rope_type 'default'",
        ),
    ],
)
def test_what_is_not_implemented_is_named(facts, change, message):
    with pytest.raises(ConfigError, match=message) as caught:
        from_hf(facts | change)
    assert "\n" not in str(caught.value)


def test_a_configuration_that_no_family_has_is_not_written():
    with pytest.raises(ValueError, match="no llama model is"):
        to_hf(dataclasses.replace(preset("tiny"), qk_norm=True), bos=None, eos=(1,))
