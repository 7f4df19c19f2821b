from __future__ import annotations

import copy
import tomllib
from dataclasses import asdict

import pytest

from infra.config import to_toml
from infra.contracts.errors import ConfigError
from infra.run_config import SECTIONS, AdmissionConfig, parse_shared

TREE = {"run": {"name": "demo"}, "prompts": {"path": "prompts.jsonl"}}


def tree_with(section: str, **values: object) -> dict:
    tree = copy.deepcopy(TREE)
    tree.setdefault(section, {}).update(values)
    return tree


def test_the_smallest_configuration():
    config = parse_shared(TREE, "run.toml")
    assert (config.run.name, config.run.seed, config.sampling.n) == ("demo", 0, 8)
    assert config.admission.in_flight_limit == 2 * config.admission.groups_per_step
    assert parse_shared({**TREE, "model": {"anything": 1}}, "run.toml") == config, (
        "other rooms read their own sections"
    )


@pytest.mark.parametrize(
    "section, values, words",
    [
        ("run", {"name": " "}, "name is empty; give the run a name"),
        ("prompts", {"path": ""}, "path is missing; give the JSON lines file"),
        ("prompts", {"held_out": 1.0}, "held_out = 1.0; must be in [0, 1)"),
        ("prompts", {"held_out": -0.1}, "must be in [0, 1)"),
        ("prompts", {"source": "csv"}, "must be one of 'addition', 'jsonl'"),
        ("prompts", {"limit": -1}, "limit = -1; at least 0"),
        ("sampling", {"n": 0}, "n = 0; at least 1"),
        ("sampling", {"temperature": -1.0}, "temperature = -1.0"),
        ("sampling", {"top_p": 0.0}, "must be in (0, 1]"),
        ("sampling", {"stop": [""]}, "empty string"),
        ("sampling", {"max_tokens": 3}, "did you mean 'max_new_tokens'?"),
        ("admission", {"groups_per_step": 0}, "groups_per_step = 0; at least 1"),
        ("admission", {"max_lag": -1, "publish_every": 1}, "max_lag = -1; at least 0"),
        ("admission", {"publish_every": 3, "max_lag": 1}, "would deadlock"),
        ("admission", {"on_stale": "ignore"}, "must be one of 'wait', 'drop', 'train'"),
        ("admission", {"lease_secs": 0}, "lease_secs = 0.0; must be positive"),
        ("admission", {"max_attempts": 0}, "max_attempts = 0; at least 1"),
        ("stop", {"updates": 0}, "updates = 0; at least 1"),
        ("stop", {"wall_secs": -1}, "wall_secs = -1.0; at least 0"),
        ("stop", {"target_pass_rate": 90}, "a share in [0, 1], not per cent"),
        ("stop", {"no_progress_secs": 0}, "no_progress_secs = 0.0; must be positive"),
        ("endpoint", {"port": 70000}, "port = 70000; must be in [0, 65535]"),
        ("endpoint", {"request_timeout_secs": 0}, "must be positive"),
        ("endpoint", {"retries": -1}, "retries = -1; at least 0"),
        ("endpoint", {"host": ""}, "host is empty"),
        ("endpoint", {"hedge_share": 1.5}, "hedge_share = 1.5; in [0, 1]"),
        ("endpoint", {"hedge_quantile": 1}, "hedge_quantile = 1.0; in (0, 1)"),
        ("endpoint", {"segment_tokens": -1}, "segment_tokens = -1; at least 0"),
    ],
)
def test_bad_values_are_named(section, values, words):
    with pytest.raises(ConfigError) as e:
        parse_shared(tree_with(section, **values), "run.toml")
    assert str(e.value).startswith(f"run.toml [{section}]: ") and words in str(e.value)


@pytest.mark.parametrize("section", ["prompts", "sampling", "admission", "stop", "endpoint"])
def test_not_a_number_is_refused_everywhere(section):
    for key, value in asdict(getattr(parse_shared(TREE, "f"), section)).items():
        if type(value) is float:
            with pytest.raises(ConfigError, match=key):
                parse_shared(tree_with(section, **{key: float("nan")}), "f")


@pytest.mark.parametrize(
    "tree, words",
    [
        ({**TREE, "samplin": {}}, "unknown section [samplin]; did you mean 'sampling'?"),
        ({**TREE, "admission": 3}, "'admission' must be a table, [admission]"),
        ({"prompts": TREE["prompts"]}, "[run]: 'name' is missing"),
        ({**TREE, "prompts": {}}, "[prompts]: path is missing"),
    ],
)
def test_bad_sections_are_named(tree, words):
    with pytest.raises(ConfigError) as e:
        parse_shared(tree, "run.toml")
    assert words in str(e.value)


def test_problems_of_all_sections_come_together():
    tree = {"run": {}, "prompts": {"held_out": 2.0}, "stop": {"updates": 0}}
    with pytest.raises(ConfigError) as e:
        parse_shared(tree, "run.toml")
    assert len(str(e.value).splitlines()) == 3


@pytest.mark.parametrize(
    "max_lag, max_in_flight, limit", [(0, 0, 24), (1, 0, 48), (2, 0, 72), (2, 5, 5)]
)
def test_in_flight_limit(max_lag, max_in_flight, limit):
    config = AdmissionConfig(groups_per_step=12, max_lag=max_lag, max_in_flight=max_in_flight)
    assert config.in_flight_limit == limit


def test_sections_have_one_owner_each():
    assert len(set(SECTIONS)) == len(SECTIONS)


def test_a_resolved_configuration_reads_back():
    config = parse_shared(TREE, "run.toml")
    assert parse_shared(tomllib.loads(to_toml(asdict(config))), "again") == config


def test_sampling_options_of_a_run_and_their_bad_values():
    options = {"min_p": 0.1, "stop_token_ids": [5], "logit_bias": [[3, -1]]}
    options |= {"max_thinking_tokens": 9, "thinking_marks": ["<a>", "</a>"]}
    sampling = parse_shared(tree_with("sampling", **options), "f").sampling
    assert (sampling.logit_bias, sampling.thinking_marks) == (((3, -1.0),), ("<a>", "</a>"))
    for key, value, says in (
        ("min_p", 1.5, "min_p = 1.5; must be in [0, 1]"),
        ("stop_token_ids", [-1], "outside [0, 2^31)"),
        ("logit_bias", [[3, -101]], "each must be in [-100, 100]"),
        ("logit_bias", [[3]], "expected a list of 2 items"),
        ("banned_token_ids", [3, 3], "name a token twice"),
        ("banned_token_ids", list(range(129)), "at most 128"),
        ("max_thinking_tokens", -1, "max_thinking_tokens = -1; must be >= 0"),
        ("thinking_marks", ["<a>"], "give two texts"),
        ("min_new_tokens", 65, "is above max_new_tokens = 64"),
    ):
        with pytest.raises(ConfigError) as e:
            parse_shared(tree_with("sampling", **{key: value}), "f")
        assert says in str(e.value)
