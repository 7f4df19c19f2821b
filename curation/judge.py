"""Judge a group: scores, rewards by policy, and the decision where the group goes.

``score_group`` adds judgements, ``decide_group`` the decision, ``judge_group`` both. The policy
from verdict to reward: the answer's own problems give 0 and are trained on; an invalid gold or a
failed scorer makes the rollout untrainable. Judgements are joined by rollout id, not by position.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np

from curation.recipe import Recipe
from curation.scorer import ANSWER_SIDE, NOT_A_REWARD, score_safely
from infra.contracts.records import (
    Decision,
    FinishReason,
    Group,
    Judgement,
    Prompt,
    Rollout,
    Verdict,
)


def judge_group(group: Group, recipe: Recipe) -> Group:
    """Score and decide; a group that has failed already passes unchanged."""
    return decide_group(score_group(group, recipe), recipe)


def score_group(group: Group, recipe: Recipe) -> Group:
    """Return the group with one judgement per rollout; earlier judgements are replaced."""
    if group.decision is Decision.FAILED:
        return group
    judgements = tuple(judge_rollout(r, group.prompt, recipe) for r in group.rollouts)
    return dataclasses.replace(group, judgements=judgements)


def judge_rollout(rollout: Rollout, prompt: Prompt, recipe: Recipe) -> Judgement:
    """Score one rollout by every scorer of the recipe.

    Returns:
        ``reward`` is the weighted sum of all values, ``task_reward`` of those that are not shaping;
        both are 0 on an untrainable rollout, where nobody may read them.
    """
    if rollout.finish_reason is FinishReason.ERROR:
        return _judgement(rollout, recipe, trainable=False)
    scores = tuple(score_safely(scorer, rollout, prompt) for scorer, _ in recipe.scorers)
    if any(score.verdict in NOT_A_REWARD for score in scores):
        return dataclasses.replace(_judgement(rollout, recipe, trainable=False), scores=scores)
    task = shaping = 0.0
    for (scorer, factor), score in zip(recipe.scorers, scores, strict=True):
        value = 0.0 if score.verdict in ANSWER_SIDE else factor * score.value
        if scorer.shaping:
            shaping += value
        else:
            task += value
    masked = recipe.mask_truncated and rollout.finish_reason is FinishReason.LENGTH
    return Judgement(
        rollout_id=rollout.rollout_id,
        scores=scores,
        reward=float(np.float32(task + shaping)),
        task_reward=task,
        trainable=rollout.response_ids is not None and len(rollout.response_ids) > 0,
        weight=0.0 if masked else 1.0,
        recipe_digest=recipe.digest,
    )


def decide_group(group: Group, recipe: Recipe) -> Group:
    """Return the group with its decision and reason: failed, rejected or accepted."""
    if group.decision is Decision.FAILED:
        return group
    verdicts = Counter(s.verdict for j in group.judgements for s in j.scores)
    if verdicts[Verdict.GOLD_INVALID]:
        return _ended(group, Decision.FAILED, "gold_invalid", _first(group, Verdict.GOLD_INVALID))
    trainable = sum(j.trainable for j in group.judgements)
    if trainable < recipe.min_group:
        reason = "scorer_failed" if verdicts[Verdict.INFRA_ERROR] else "too_few_trainable"
        detail = f"{trainable} of {len(group.rollouts)} trainable, {recipe.min_group} needed"
        first = _first(group, Verdict.INFRA_ERROR)
        return _ended(group, Decision.FAILED, reason, f"{detail}; {first}" if first else detail)
    for rule in recipe.filters:
        reason = rule.decide(group)
        if reason:
            return _ended(group, Decision.REJECTED, reason)
    return _ended(group, Decision.ACCEPTED)


def _judgement(rollout: Rollout, recipe: Recipe, *, trainable: bool) -> Judgement:
    return Judgement(
        rollout_id=rollout.rollout_id,
        scores=(),
        reward=0.0,
        task_reward=0.0,
        trainable=trainable,
        weight=0.0,
        recipe_digest=recipe.digest,
    )


def _ended(group: Group, decision: Decision, reason: str = "", error: str = "") -> Group:
    return dataclasses.replace(group, decision=decision, reason=reason, error=error)


def _first(group: Group, verdict: Verdict) -> str:
    """The first scorer's own words behind a verdict."""
    return next(
        (
            f"{score.scorer}: {score.explanation}"
            for judgement in group.judgements
            for score in judgement.scores
            if score.verdict is verdict
        ),
        "",
    )
