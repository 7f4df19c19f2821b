import dataclasses
import tomllib

import pytest

from infra.config import to_toml
from infra.contracts.errors import ConfigError
from pipelines.beam_options import beam_flags
from pipelines.options import PipelineOptions, parse_options, read_run_config
from tests.pipelines.run_folder import CONFIG, make_run

TREE = tomllib.loads(CONFIG)


def tree(**sections):
    return TREE | sections


def test_defaults_and_own_values():
    options = parse_options(TREE, "x.toml")
    assert options.pipeline == PipelineOptions().pipeline
    assert options.evaluation.problems == 10
    assert options.recipe.settings == {"exact_answer": {"extraction": ["first_line"]}}


def test_what_is_written_out_is_read_back_the_same():
    """`run.toml` holds every key resolved."""
    options = parse_options(TREE, "x.toml")
    text = to_toml(TREE | dataclasses.asdict(options))
    assert parse_options(tomllib.loads(text), "run.toml") == options


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"pipeline": {"proceses": 2}}, r"\[pipeline\]: unknown key 'proceses'.*'processes'"),
        ({"pipeline": {"processes": 0}}, "processes = 0; at least 1"),
        ({"pipeline": {"runner": "DirectRunner"}}, "not one runner; name it"),
        ({"recipe": {"scorers": ["exact_anser"]}}, "did you mean 'exact_answer'"),
        ({"sampling": {"n": 1}}, "n = 1 with .* min_group = 2"),
        ({"evaluation": {"problems": 0}}, "problems must be >= 1"),
        ({"evaluations": {}}, r"unknown section \[evaluations\]; did you mean 'evaluation'"),
    ],
)
def test_mistakes_are_named(sections, says):
    with pytest.raises(ConfigError, match=says):
        parse_options(tree(**sections), "x.toml")


def test_all_sections_problems_at_once():
    with pytest.raises(ConfigError) as error:
        parse_options(tree(pipeline={"a": 1}, evaluation={"b": 1}), "x.toml")
    assert "[pipeline]" in str(error.value)
    assert "[evaluation]" in str(error.value)


def test_a_run_without_configuration(tmp_path):
    store = make_run(tmp_path, "[run]\nname=")
    with pytest.raises(ConfigError, match="cannot be read as TOML"):
        read_run_config(store)
    store.delete("run.toml")
    with pytest.raises(ConfigError, match="no run there"):
        read_run_config(store)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], ["--runner=BundleBasedDirectRunner", "--streaming"]),
        (["--project=p"], ["--project=p", "--runner=BundleBasedDirectRunner", "--streaming"]),
        (["--runner", "PrismRunner"], ["--runner", "PrismRunner", "--streaming"]),
        (["--streaming", "--runner=X"], ["--streaming", "--runner=X"]),
    ],
)
def test_beam_gets_the_rest_and_a_named_runner(argv, expected):
    assert beam_flags(argv, "BundleBasedDirectRunner", streaming=True) == expected


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--projct=p"], "did you mean '--project'"),
        (["word"], "unknown option 'word'"),
        (["--runner=DirectRunner"], "not one runner"),
    ],
)
def test_what_beam_does_not_know_is_refused(argv, says):
    with pytest.raises(ConfigError, match=says):
        beam_flags(argv, "BundleBasedDirectRunner", streaming=True)
