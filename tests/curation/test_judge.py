import dataclasses

import pytest

from curation.judge import judge_group
from curation.recipe import Recipe, RecipeConfig, build_recipe
from curation.scorer import make_score
from infra.contracts.records import Decision, FinishReason, Verdict
from tests.builders import make_group


class Says:
    """Reads verdict and value from the response: ``fail 0.5``; ``raise`` raises."""

    name, version, shaping, settings_digest = "says", 1, False, "says"

    def score(self, rollout, prompt):
        verdict, _, value = rollout.response_text.partition(" ")
        if verdict == "raise":
            raise ZeroDivisionError("a defect")
        return make_score(self, Verdict(verdict), float(value or 0))


class Shaping(Says):
    name, shaping = "shaping", True

    def score(self, rollout, prompt):
        return make_score(self, Verdict.FAIL, -0.25)


def recipe(**rules):
    settings = {
        "scorers": ((Says(), 2.0), (Shaping(), 1.0)),
        "filters": (),
        "min_group": 2,
        "mask_truncated": False,
        "digest": "digest",
    }
    return Recipe(**(settings | rules))


def group_of(*texts, finish=FinishReason.STOP):
    group = make_group(n=len(texts), decision=None)
    rollouts = tuple(
        dataclasses.replace(r, response_text=t, finish_reason=finish)
        for r, t in zip(group.rollouts, texts, strict=True)
    )
    return dataclasses.replace(group, rollouts=rollouts)


@pytest.mark.parametrize(
    ("text", "task", "reward", "trainable"),
    [
        ("pass 1", 2.0, 1.75, True),
        ("fail 0", 0.0, -0.25, True),
        ("fail -0.5", -1.0, -1.25, True),
        ("no_answer 3", 0.0, -0.25, True),
        ("answer_unparsed 3", 0.0, -0.25, True),
        ("answer_limit 3", 0.0, -0.25, True),
        ("timeout 3", 0.0, -0.25, True),
        ("gold_invalid 1", 0.0, 0.0, False),
        ("infra_error 1", 0.0, 0.0, False),
        ("raise", 0.0, 0.0, False),
    ],
)
def test_policy_from_verdict_to_reward(text, task, reward, trainable):
    judged = judge_group(group_of(text, "pass 1", "pass 1"), recipe()).judgements[0]
    assert (judged.task_reward, judged.reward, judged.trainable) == (task, reward, trainable)
    assert [s.scorer for s in judged.scores] == ["says@1", "shaping@1"]


@pytest.mark.parametrize(
    ("texts", "decision", "reason"),
    [
        (("pass 1", "fail 0"), Decision.ACCEPTED, ""),
        (("pass 1", "raise"), Decision.FAILED, "scorer_failed"),
        (("pass 1", "raise", "fail 0"), Decision.ACCEPTED, ""),
        (("pass 1", "gold_invalid", "fail 0"), Decision.FAILED, "gold_invalid"),
        (("pass 1",), Decision.FAILED, "too_few_trainable"),
        ((), Decision.FAILED, "too_few_trainable"),
    ],
)
def test_decisions(texts, decision, reason):
    judged = judge_group(group_of(*texts), recipe())
    assert (judged.decision, judged.reason) == (decision, reason)
    assert bool(judged.error) == (decision is Decision.FAILED)


def test_the_scorers_own_words_stand_in_the_failure():
    judged = judge_group(group_of("raise", "raise"), recipe())
    assert judged.error == "0 of 2 trainable, 2 needed; says@1: ZeroDivisionError: a defect"


def test_engine_errors_are_not_scored():
    judged = judge_group(group_of("pass 1", "pass 1", finish=FinishReason.ERROR), recipe())
    assert judged.decision is Decision.FAILED
    assert not any(j.trainable or j.scores for j in judged.judgements)


def test_judgements_are_joined_by_id():
    group = group_of("pass 1", "fail 0", "fail 0.25")
    mixed = dataclasses.replace(group, rollouts=group.rollouts[::-1])
    by_id = [{j.rollout_id: j for j in judge_group(g, recipe()).judgements} for g in (group, mixed)]
    assert by_id[0] == by_id[1]
    assert set(by_id[0]) == {r.rollout_id for r in group.rollouts}


def test_masking_keeps_the_sample_in_the_baseline():
    cut = group_of("pass 1", "fail 0", finish=FinishReason.LENGTH)
    assert [j.weight for j in judge_group(cut, recipe(mask_truncated=True)).judgements] == [0, 0]
    assert [j.weight for j in judge_group(cut, recipe()).judgements] == [1, 1]
    assert all(j.trainable for j in judge_group(cut, recipe(mask_truncated=True)).judgements)


def test_filters_see_the_task_reward():
    """Shaping alone (lengths differ) must not save a group without a task signal."""
    real = build_recipe(
        RecipeConfig(
            scorers=("exact_answer", "length_penalty"),
            settings={"length_penalty": {"kind": "per_token"}},
        )
    )
    short = group_of("1", "1").rollouts[0]
    longer = make_group(n=2, tokens=5, decision=None).rollouts[1]
    longer = dataclasses.replace(longer, response_text="1")
    judged = judge_group(dataclasses.replace(group_of("1", "1"), rollouts=(short, longer)), real)
    assert [j.reward for j in judged.judgements] == [-2.0, -4.0]
    assert (judged.decision, judged.reason) == (Decision.REJECTED, "zero_variance")


def test_a_failed_group_passes_unchanged():
    failed = make_group(decision=Decision.FAILED)
    assert judge_group(failed, recipe()) is failed
