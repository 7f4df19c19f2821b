"""A scorer judges one rollout: code with a name, a version and settings, all part of its identity.

A scorer is a frozen dataclass whose fields *are* its settings; ``settings_digest`` hashes them.
Registered in ``curation/registry.py`` (one file and one line per scorer); user code comes in
through ``curation/scorers/user_scorer.py``. All pass ``tests/contracts/scorer_contract.py``.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Protocol

from infra.contracts.ids import content_id
from infra.contracts.records import Prompt, Rollout, Score, Verdict

EXPLANATION_CHARS = 300
"""Longest explanation that is stored; hostile text must not fill the shards."""

ANSWER_SIDE = frozenset(
    (Verdict.NO_ANSWER, Verdict.ANSWER_UNPARSED, Verdict.ANSWER_LIMIT, Verdict.TIMEOUT)
)
"""The answer's own fault: the reward is 0 and the rollout is trained on."""

NOT_A_REWARD = frozenset((Verdict.GOLD_INVALID, Verdict.INFRA_ERROR))
"""Not the answer's fault: the rollout is untrainable, never a silent 0."""


class Scorer(Protocol):
    """Judges one rollout; the same inputs give the same score, whatever was scored before."""

    name: str
    version: int
    shaping: bool
    """True: changes the reward but is not part of ``task_reward`` (penalties)."""

    @property
    def settings_digest(self) -> str:
        """Names everything that could change a score besides name and version."""

    def score(self, rollout: Rollout, prompt: Prompt) -> Score:
        """Judge one rollout. An exception means that the scorer failed, not the answer."""


class SettingsDigest:
    """Mix-in for scorers and filters that are frozen dataclasses of plain values."""

    @functools.cached_property
    def settings_digest(self) -> str:
        return content_id("settings", json.dumps(dataclasses.asdict(self), sort_keys=True))


def label(scorer: Scorer) -> str:
    """How a score names its scorer, e.g. ``exact_answer@1``."""
    return f"{scorer.name}@{scorer.version}"


def clip(text: str, limit: int = EXPLANATION_CHARS) -> str:
    """Shorten for an explanation, and make it valid Unicode (lone surrogates cannot be stored)."""
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= limit else f"{text[:limit]}..."


def make_score(
    scorer: Scorer,
    verdict: Verdict,
    value: float = 0.0,
    explanation: str = "",
    components: dict[str, float] | None = None,
) -> Score:
    """Build a ``Score`` that carries the scorer's identity and a capped explanation."""
    return Score(
        scorer=label(scorer),
        settings_digest=scorer.settings_digest,
        verdict=verdict,
        value=value,
        components=components or {},
        explanation=clip(explanation),
    )


def score_safely(scorer: Scorer, rollout: Rollout, prompt: Prompt) -> Score:
    """Score one rollout; a scorer that raises gives ``infra_error`` with the exception in words.

    The rollout becomes untrainable and the group keeps its other rollouts: a defect in a scorer is
    data that is counted and can be re-scored, not a reward of 0 and not a dead pipeline.
    """
    try:
        return scorer.score(rollout, prompt)
    except Exception as e:
        return make_score(scorer, Verdict.INFRA_ERROR, 0.0, f"{type(e).__name__}: {e}")
