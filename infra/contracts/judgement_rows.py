"""Judgements as rows, joined to rollouts by ``rollout_id``: in shards and, alone, in re-scores."""

from __future__ import annotations

from typing import Any

from infra.contracts.records import Judgement, Score, Verdict
from infra.contracts.rollout_schema import JUDGEMENT_COLUMNS


def judgement_row(judgement: Judgement | None) -> tuple[Any, ...]:
    """One value per column of ``JUDGEMENT_COLUMNS``; all None for a rollout without judgement."""
    if judgement is None:
        return (None,) * len(JUDGEMENT_COLUMNS)
    return (
        [
            (s.scorer, s.settings_digest, s.verdict.value, s.value, s.components, s.explanation)
            for s in judgement.scores
        ],
        judgement.reward,
        judgement.task_reward,
        judgement.trainable,
        judgement.weight,
        judgement.recipe_digest,
    )


def judgement_of_row(rollout_id: str, verdict: tuple[Any, ...]) -> Judgement:
    """Inverse of ``judgement_row``. Raises ``ValueError`` for an unknown verdict."""
    scores, reward, task_reward, trainable, weight, recipe_digest = verdict
    return Judgement(
        rollout_id=rollout_id,
        scores=tuple(
            Score(
                scorer=scorer,
                settings_digest=settings,
                verdict=Verdict(verdict),
                value=value,
                components=components,
                explanation=explanation,
            )
            for scorer, settings, verdict, value, components, explanation in scores
        ),
        reward=reward,
        task_reward=task_reward,
        trainable=trainable,
        weight=weight,
        recipe_digest=recipe_digest,
    )
