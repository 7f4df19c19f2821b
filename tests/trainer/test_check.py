from __future__ import annotations

import json
import subprocess
import sys

import pytest

from infra.contracts.errors import ConfigError
from trainer.check import check, count_parameters
from trainer.config import parse_trainer
from trainer.main import main
from trainer.model.config import PRESETS, ModelConfig
from trainer.model.params_io import count_params

BASE = {"run": {"name": "t"}, "prompts": {"source": "addition"}, "model": {"source": "tiny"}}
QWEN = ModelConfig(layers=2, dim=8, heads=2, kv_heads=1, head_dim=6, ffn=12, vocab=11,
                   tied=False, qkv_bias=True, qk_norm=True, family="qwen2")  # fmt: skip


@pytest.mark.parametrize("config", [*PRESETS.values(), QWEN], ids=lambda c: c.family)
def test_parameters_are_counted_without_jax_as_with_it(config):
    assert count_parameters(config)[0] == count_params(config)


def test_sizes_and_every_key():
    report = check(parse_trainer(BASE, "x.toml"), prepare=False, environ={})
    assert report.version_bytes == 4 * report.parameters
    assert report.checkpoint_bytes == 12 * report.parameters
    assert report.sections["checkpoint"]["keep_versions"] == 4
    narrow = parse_trainer(BASE | {"training": {"publish_dtype": "bfloat16"}}, "x.toml")
    assert check(narrow, prepare=False, environ={}).version_bytes < report.version_bytes


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"sampling": {"n": 1}}, r"sampling\.n = 1 with objective\.advantage = 'mean_batch_std'"),
        ({"optimizer": {"lrr": 1.0}}, r"\[optimizer\]: unknown key 'lrr'; did you mean 'lr'"),
        ({"optimizer": {"schedule": "cosine"}}, "decay_steps = 0 with schedule = 'cosine'"),
        ({"optimizer": {"name": "moun"}}, "must be one of 'adamw', 'muon'"),
        ({"training": {"minibatches": 13}}, "minibatches = 13 with admission.groups_per_step = 12"),
        ({"model": {"source": "folder"}}, "give a path with source = 'folder'"),
        (
            {"model": {"source": "smollm2-135m"}, "warm_start": {"target": 0.3}},
            "target is for model.source = 'tiny'",
        ),
    ],
)
def test_what_is_refused(sections, says):
    with pytest.raises(ConfigError, match=says):
        parse_trainer(BASE | sections, "x.toml")


def test_the_check_loads_no_jax(tmp_path):
    """It must answer within a second; JAX alone takes that."""
    config = tmp_path / "c.toml"
    config.write_text(
        '[run]\nname = "t"\n[prompts]\nsource = "addition"\n[model]\nsource = "tiny"\n'
    )
    code = (
        "import sys\nfrom trainer.main import main\n"
        f"assert main(['{config}', '--check', '--json']) == 0\n"
        "assert not {'jax', 'flax', 'optax'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["parameters"] == 333_792


def test_a_folder_that_is_no_run(tmp_path):
    with pytest.raises(ConfigError, match="no run there; give the folder"):
        main([str(tmp_path)])
