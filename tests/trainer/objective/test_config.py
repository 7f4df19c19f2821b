"""[objective]: names fill in their constants, and nonsense is refused in one line."""

from __future__ import annotations

import pytest

from infra.config import parse_section
from infra.contracts.errors import ConfigError
from trainer.objective.config import ObjectiveConfig, check_objective
from trainer.objective.recipes import RECIPES
from trainer.objective.registry import build_objective


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_builds_and_writes_down_its_constants(name):
    config = ObjectiveConfig(name=name)
    check_objective(config, 8, 1)
    surrogate = build_objective(config, 1).surrogate
    for knob, value in RECIPES[name].knobs.items():
        assert getattr(config, knob) == value
        if knob not in ("beta", "gamma", "gae_lambda", "value_clip", "critic_lr"):
            assert getattr(surrogate, knob) == value
    assert None not in (config.advantage, config.aggregation, config.kl_estimator)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"name": "grpp"}, "did you mean 'grpo'"),
        ({"name": "aipo", "clip_low": 0.1}, "clip_low means nothing to 'aipo', which has cap"),
        ({"name": "dpo", "advantage": "mean"}, "advantage = 'mean' means nothing to 'dpo'"),
        ({"name": "grpo", "clip_high": -1.0}, "clip_high = -1.0; must be positive"),
        ({"name": "grpo", "dual_clip": 0.5}, "greater than 1"),
        ({"name": "aipo", "cap": 0.5}, "cap = 0.5; at least 1"),
        ({"kl_coef": 0.1, "kl_in": "loss", "kl_estimator": "k1"}, "no gradient on average"),
        ({"kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k3"}, "only 'k1' is a reward"),
        ({"reference": "folder"}, "nothing uses one; set kl_coef"),
        ({"behaviour_floor": 2.0}, "behaviour_floor = 2.0"),
        ({"advantage": "median"}, "must be one of"),
        ({"name": "grpo", "advantage": "gae"}, "'gae' goes with 'ppo' and only with it"),
        ({"name": "ppo", "gamma": 1.5}, "gamma = 1.5; must be in [0, 1]"),
        ({"kl_coef": -1.0}, "kl_coef = -1.0"),
    ],
)
def test_nonsense_is_refused_in_one_line(table, said):
    with pytest.raises(ConfigError, match=r"^run\.toml \[objective\]: [^\n]+$") as caught:
        parse_section(ObjectiveConfig, table, "run.toml [objective]")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "n", "max_lag", "said"),
    [
        ({"name": "grpo", "behaviour_correction": "off"}, 4, 1, "behaviour_correction = 'off'"),
        ({"name": "aipo", "behaviour_correction": "on"}, 4, 1, "'on' means nothing to 'aipo'"),
        ({"name": "kto", "behaviour_correction": "on"}, 4, 0, "'on' means nothing to 'kto'"),
        ({"name": "grpo"}, 1, 0, "a group of one has no signal"),
        ({"name": "dpo"}, 1, 0, "a group of one has no signal"),
    ],
)
def test_what_does_not_go_with_the_run_is_refused(settings, n, max_lag, said):
    with pytest.raises(ConfigError, match=said):
        check_objective(ObjectiveConfig(**settings), n, max_lag)


def test_what_is_allowed():
    for settings, n, max_lag in (
        ({"name": "grpo", "behaviour_correction": "off"}, 4, 0),
        ({"name": "grpo", "behaviour_correction": "never"}, 4, 4),
        ({"name": "aipo", "behaviour_correction": "off"}, 4, 4),  # its own ratio is against mu
        ({"name": "kto"}, 1, 2),
        ({"name": "reinforce_pp"}, 1, 2),
    ):
        check_objective(ObjectiveConfig(**settings), n, max_lag)


def test_another_name_takes_its_own_constants():
    """What a run writes down can be read again, and continued under another objective."""
    config = ObjectiveConfig(name="grpo", advantage="mean", clip_low=0.2, kl_coef=0.1)
    written = config.as_written()
    assert written == {"name": "grpo", "advantage": "mean", "kl_coef": 0.1}
    assert ObjectiveConfig(**written) == config
    other = ObjectiveConfig(**written | {"name": "aipo"})
    assert (other.cap, other.clip_low, other.advantage) == (5.0, None, "mean")
    assert "advantage mean, aggregation sequence_mean, clip_low 0.2" in config.describe(1)
    assert "correction truncate token 0 to 2, kl 0.1 k3+ in the loss" in config.describe(1)
