"""A recipe: the frozen list of scorers and filters of a run, with settings and one digest.

``[recipe]`` in TOML::

    scorers = ["exact_answer", "length_penalty"]   # registry names, module:attr, path/my.py:score
    filters = ["zero_variance"]
    min_group = 2

    [recipe.settings.exact_answer]
    extraction = ["first_line"]

The digest covers names, versions, settings and the source of user scorers; it stands in every
judgement and shard, so what was judged by which rules can always be told.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from curation.filter import Filter
from curation.registry import FILTERS, SCORERS
from curation.scorer import Scorer
from curation.scorers.user_scorer import (
    UserScorer,
    UserScorerSettings,
    is_user_spec,
    open_user_scorer,
)
from infra.config import nearest, parse_section
from infra.contracts.errors import ConfigError
from infra.contracts.ids import content_id
from infra.contracts.records import SamplingParams


@dataclass(frozen=True, kw_only=True)
class RecipeConfig:
    """[recipe]: how rollouts are judged."""

    scorers: tuple[str, ...] = ("exact_answer",)
    """In order; the first one's ``pass`` is the pass rate that is reported."""
    filters: tuple[str, ...] = ("zero_variance",)
    """In order; the first reason rejects the group."""
    min_group: int = 2
    """A group with fewer trainable rollouts goes to ``failures/``."""
    mask_truncated: bool = False
    """Give rollouts cut at the token limit the loss weight 0 (DAPO's overlong filtering)."""
    weights: dict[str, float] = field(default_factory=dict)
    """Scorer -> factor of its value in the reward; 1 where not given."""
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Scorer or filter -> its settings table."""

    def __post_init__(self) -> None:
        names = (*self.scorers, *self.filters)
        checks = [
            (bool(self.scorers), "scorers is empty; name at least one, e.g. exact_answer"),
            (len(set(names)) == len(names), "scorers and filters must not name one twice"),
            (self.min_group >= 1, f"min_group = {self.min_group}; at least 1"),
        ]
        for key in self.weights:
            checks.append((key in self.scorers, f"weights names '{key}', which is no scorer here"))
        for key in self.settings:
            checks.append((key in names, f"settings.{key} is not used; {nearest(key, names)}"))
        problems = [text for ok, text in checks if not ok]
        if problems:
            raise ValueError("; ".join(problems))


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What ``judge`` needs: the parts, built and checked."""

    scorers: tuple[tuple[Scorer, float], ...]
    """(scorer, factor of its value)"""
    filters: tuple[Filter, ...]
    min_group: int
    mask_truncated: bool
    digest: str

    def close(self) -> None:
        """End the child processes of user scorers; a later score starts them again."""
        for scorer, _ in self.scorers:
            if isinstance(scorer, UserScorer):
                scorer.child.close()


def build_recipe(config: RecipeConfig) -> Recipe:
    """Build the parts that a configuration names; user scorers start their child process.

    Raises:
        ConfigError: an unknown name (with the nearest known one), a wrong setting, or a user scorer
            that cannot be loaded. All problems of the table in one message.
    """
    problems: list[str] = []
    scorers = [_build(name, SCORERS, "scorer", config, problems) for name in config.scorers]
    filters = [_build(name, FILTERS, "filter", config, problems) for name in config.filters]
    if problems:
        raise ConfigError("\n".join(problems))
    weights = [config.weights.get(name, 1.0) for name in config.scorers]
    identity = [
        [[part.name, str(part.version), part.settings_digest] for part in scorers],
        weights,
        [[part.name, str(part.version), part.settings_digest] for part in filters],
        config.min_group,
        config.mask_truncated,
    ]
    return Recipe(
        scorers=tuple(zip(scorers, weights, strict=True)),
        filters=tuple(filters),
        min_group=config.min_group,
        mask_truncated=config.mask_truncated,
        digest=content_id("recipe", json.dumps(identity)),
    )


def check_against_sampling(config: RecipeConfig, sampling: SamplingParams) -> None:
    """Refuse settings under which no group could ever be trained on. Raises ``ConfigError``."""
    if sampling.n < config.min_group:
        raise ConfigError(
            f"[sampling] n = {sampling.n} with [recipe] min_group = {config.min_group}: every "
            "group would fail; raise n, or lower min_group"
        )
    if sampling.n < 2 and "zero_variance" in config.filters:
        raise ConfigError(
            f"[sampling] n = {sampling.n} with the filter zero_variance: every group would be "
            "rejected, since one rollout has no group advantage; set n >= 2 or filters = []"
        )


def _build(
    name: str, registry: dict[str, Any], kind: str, config: RecipeConfig, problems: list[str]
) -> Any:
    where = f"[recipe.settings.{name}]"
    settings = config.settings.get(name, {})
    try:
        if kind == "scorer" and is_user_spec(name):
            return open_user_scorer(name, parse_section(UserScorerSettings, settings, where))
        if name not in registry:
            hint = nearest(name, registry)
            own = "; your own: module:attr or path/my.py:score" if kind == "scorer" else ""
            raise ConfigError(f"[recipe]: no {kind} '{name}'; {hint}{own}")
        return parse_section(registry[name], settings, where)
    except ConfigError as e:
        problems.append(str(e))
        return None
