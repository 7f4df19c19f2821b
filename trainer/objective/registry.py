"""Which objectives there are, by the name in ``[objective] name``. One line each."""

from __future__ import annotations

from collections.abc import Callable

from trainer.config import ObjectiveConfig
from trainer.objective.aipo import Aipo
from trainer.objective.cispo import Cispo
from trainer.objective.grpo import Grpo
from trainer.objective.policy_loss import Objective
from trainer.objective.reinforce import Reinforce

OBJECTIVES: dict[str, Callable[[ObjectiveConfig, float | None], Objective]] = {
    "grpo": lambda c, cap: Grpo(clip_low=c.clip_low, clip_high=c.clip_high, behaviour_cap=cap),
    "cispo": lambda c, cap: Cispo(cap=c.cap, behaviour_cap=cap),
    "aipo": lambda c, cap: Aipo(rho=c.cap),
    "reinforce": lambda c, cap: Reinforce(behaviour_cap=cap),
}


def build_objective(config: ObjectiveConfig, max_lag: int) -> Objective:
    """Return the configured objective, with its behaviour correction where one is due."""
    cap = config.behaviour_cap if config.corrects(max_lag) else None
    return OBJECTIVES[config.name](config, cap)
