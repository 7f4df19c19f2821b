import json
from pathlib import Path

import pytest

from curation.recipe import RecipeConfig, build_recipe, check_against_sampling
from infra.config import parse_section
from infra.contracts.errors import ConfigError
from infra.contracts.records import SamplingParams

GOLDEN = Path(__file__).parent / "golden" / "recipe_digests.json"
RECIPES = {
    "defaults": {},
    "first_line": {"settings": {"exact_answer": {"extraction": ["first_line"]}}},
    "with_penalty": {
        "scorers": ["exact_answer", "length_penalty"],
        "weights": {"length_penalty": 0.1},
        "filters": ["zero_variance", "truncated"],
        "settings": {"truncated": {"max_share": 0.25}},
    },
    "masked": {"mask_truncated": True},
    "min_group": {"min_group": 3},
    "no_filters": {"filters": []},
}


def recipe(table):
    return build_recipe(parse_section(RecipeConfig, table, "[recipe]"))


def test_golden_digests():
    """A digest that changes makes old shards another recipe's: never without a new version."""
    digests = {name: recipe(table).digest for name, table in RECIPES.items()}
    assert digests == json.loads(GOLDEN.read_text())
    assert len(set(digests.values())) == len(RECIPES)


def test_order_counts():
    both = [recipe({"filters": f}).digest for f in (["truncated", "zero_variance"],
                                                     ["zero_variance", "truncated"])]  # fmt: skip
    assert both[0] != both[1]


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"scorers": []}, "scorers is empty"),
        ({"scorers": ["exact_anser"]}, "did you mean 'exact_answer'"),
        ({"filters": ["zero_varience"]}, "did you mean 'zero_variance'"),
        ({"scorers": ["exact_answer", "exact_answer"]}, "twice"),
        ({"min_group": 0}, "min_group = 0"),
        ({"weights": {"x": 1.0}}, "no scorer here"),
        ({"settings": {"length_penalty": {}}}, "length_penalty is not used"),
        ({"settings": {"exact_answer": {"extractoin": []}}}, "did you mean 'extraction'"),
        ({"scorers": ["nowhere.py:score"]}, "no such file"),
    ],
)
def test_mistakes_are_named(table, says):
    with pytest.raises(ConfigError, match=says):
        recipe(table)


def test_all_problems_at_once():
    with pytest.raises(ConfigError) as error:
        recipe({"scorers": ["a_scorer"], "filters": ["a_filter"]})
    assert "a_scorer" in str(error.value)
    assert "a_filter" in str(error.value)


@pytest.mark.parametrize(
    ("table", "n", "says"),
    [({}, 1, "min_group = 2"), ({"min_group": 1}, 1, "zero_variance"), ({}, 2, "")],
)
def test_groups_that_could_never_be_trained_on(table, n, says):
    config = parse_section(RecipeConfig, table, "[recipe]")
    if not says:
        return check_against_sampling(config, SamplingParams(n=n))
    with pytest.raises(ConfigError, match=says):
        check_against_sampling(config, SamplingParams(n=n))


def test_a_user_scorer_is_part_of_the_digest(tmp_path):
    path = tmp_path / "my.py"
    digests = []
    for body in ("return 1.0", "return 0.0"):
        path.write_text(f"def score(text, answer, metadata): {body}\n")
        built = recipe({"scorers": [f"{path}:score"]})
        digests.append(built.digest)
        built.scorers[0][0].child.close()
    assert digests[0] != digests[1]
