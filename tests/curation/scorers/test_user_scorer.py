import pytest

from curation.scorers.user_scorer import UserScorerSettings, open_user_scorer
from infra.contracts.errors import ConfigError
from tests.contracts.scorer_contract import ScorerContract, prompt_of, rollout_of

CODE = """
import os, sys, time
calls = 0

def score(text, answer, metadata):
    print("a user's print breaks nothing")
    if "hang" in text: time.sleep(100)
    if "exit" in text: os._exit(3)
    if "raise" in text: raise ValueError("no idea")
    if "nan" in text: return float("nan")
    if "none" in text: return None
    if "half" in text: return 0.5
    return text.strip().split("\\n")[0].strip() == answer

class Mine:
    def score(self, rollout, prompt):
        from infra.contracts.records import Score, Verdict
        right = rollout.response_text.strip() == prompt.answer
        verdict = Verdict.PASS if right else Verdict.FAIL
        return Score(scorer="mine", settings_digest="", verdict=verdict,
                     value=float(right), components={"tokens": float(len(rollout.response_ids))})
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("user") / "my.py"
    path.write_text(CODE)
    return path


@pytest.fixture(scope="module", params=["score", "Mine"])
def scorer(request, source):
    scorer = open_user_scorer(f"{source}:{request.param}", UserScorerSettings())
    yield scorer
    scorer.child.close()


class TestUserScorer(ScorerContract):
    cases = (("45", "46\n45", "45"), (" 7", "8", "7"))


@pytest.fixture
def hasty(source):
    scorer = open_user_scorer(f"{source}:score", UserScorerSettings(deadline_secs=0.3))
    yield scorer
    scorer.child.close()


@pytest.mark.parametrize(
    ("text", "verdict", "says"),
    [
        ("raise", "infra_error", "ValueError: no idea"),
        ("nan", "infra_error", "finite"),
        ("none", "infra_error", "NoneType"),
        ("exit", "infra_error", "ended with 3"),
        ("hang", "timeout", "within 0.3 s"),
        ("half", "fail", ""),
    ],
)
def test_what_goes_wrong_is_said_and_the_next_call_works(hasty, text, verdict, says):
    score = hasty.score(rollout_of(text), prompt_of("1"))
    assert score.verdict == verdict
    assert says in score.explanation
    assert score.value == (0.5 if text == "half" else 0.0)
    assert hasty.score(rollout_of("1"), prompt_of("1")).verdict == "pass"
    assert hasty.child.starts == (2 if text in ("exit", "hang") else 1)


def test_a_child_that_does_not_read_is_killed_in_time(hasty):
    assert hasty.score(rollout_of("hang"), prompt_of("1")).verdict == "timeout"
    assert hasty.score(rollout_of("1" + " " * 900_000), prompt_of("1")).verdict == "pass"


def test_the_digest_covers_the_source_and_not_the_folder(tmp_path):
    digests = []
    for folder, extra in (("a", ""), ("b", ""), ("c", "# edited\n")):
        path = tmp_path / folder / "my.py"
        path.parent.mkdir()
        path.write_text(CODE + extra)
        scorer = open_user_scorer(f"{path}:score", UserScorerSettings())
        digests.append((scorer.name, scorer.settings_digest))
        scorer.child.close()
    assert digests[0] == digests[1] != digests[2]
    assert digests[0][0] == "my.py:score"


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("nowhere.py:score", "no such file"),
        ("no.such.module:score", "no such file or module"),
        ("{source}:missing", "no attribute 'missing'"),
        ("{source}:calls", "neither a function nor a scorer"),
        (":x", "give module:attr"),
    ],
)
def test_a_scorer_that_cannot_be_loaded_is_a_clear_error(source, spec, says):
    with pytest.raises(ConfigError, match=says):
        open_user_scorer(spec.format(source=source), UserScorerSettings())


def test_a_module_by_name():
    scorer = open_user_scorer("tests.curation.own_scorer:is_even", UserScorerSettings())
    assert scorer.score(rollout_of("4"), prompt_of(None)).verdict == "pass"
    assert scorer.name == "tests.curation.own_scorer:is_even"
    scorer.child.close()
