import pytest

from curation.scorers.exact_answer import ExactAnswer
from infra.config import parse_section
from infra.contracts.errors import ConfigError
from tests.contracts.scorer_contract import ScorerContract, prompt_of, rollout_of


class TestFirstLine(ScorerContract):
    cases = ((" 45\nQ: 1", " 46\n45", "45"), ("7", "8", "7"), ("1,000", "100", "1000.0"))

    @pytest.fixture
    def scorer(self):
        return ExactAnswer(extraction=("first_line",))


class TestBoxedThenNumber(ScorerContract):
    cases = (
        (r"\boxed{1/2}", r"\boxed{2} although 0.5", "0.5"),
        ("it is 3", "it is 4", "3"),
    )

    @pytest.fixture
    def scorer(self):
        return ExactAnswer(extraction=("boxed", "last_number"))


CASES = [
    ("12", "12", "pass"),
    ("12.0", "12", "pass"),
    ("1/3", "0.3333333333", "fail"),
    ("9007199254740993", "9007199254740992", "fail"),
    ("Paris", "12", "answer_unparsed"),
    ("12", "Paris", "fail"),
    ("new  york", "new york", "pass"),
    ("", "12", "no_answer"),
    ("12", "", "gold_invalid"),
    ("12", None, "gold_invalid"),
    ("12", "x" * 5000, "gold_invalid"),
    ("12", "9" * 300, "gold_invalid"),
    ("9" * 300, "12", "answer_limit"),
    ("x" * 5000, "12", "answer_limit"),
    ("x" * 1_000_001, "12", "answer_limit"),
]


@pytest.mark.parametrize(("text", "gold", "verdict"), CASES)
def test_verdicts(text, gold, verdict):
    score = ExactAnswer(extraction=("whole",)).score(rollout_of(text), prompt_of(gold))
    assert score.verdict == verdict
    assert score.value == (1.0 if verdict == "pass" else 0.0)


def test_text_only():
    scorer = ExactAnswer(extraction=("whole",), numeric=False, ignore_case=True)
    assert scorer.score(rollout_of("12.0"), prompt_of("12")).verdict == "fail"
    assert scorer.score(rollout_of("PARIS"), prompt_of("Paris")).verdict == "pass"


def test_the_extraction_is_recorded():
    scorer = ExactAnswer(extraction=("boxed", "last_line"))
    score = scorer.score(rollout_of("so\n7"), prompt_of("7"))
    assert score.explanation.startswith("extraction=last_line: '7'")
    assert score.components == {"extraction": 1.0}


def test_unknown_methods_are_refused():
    with pytest.raises(ConfigError, match="extraction names boxes; known: first_line"):
        parse_section(ExactAnswer, {"extraction": ["boxes"]}, "[recipe]")


def test_every_setting_is_in_the_digest():
    variants = ({}, {"numeric": False}, {"ignore_case": True}, {"extraction": ("whole",)})
    assert len({ExactAnswer(**v).settings_digest for v in variants}) == len(variants)
