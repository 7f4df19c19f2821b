"""Which objectives there are, by the name in ``[objective] name``: one entry each.

A recipe is a surrogate with the advantage, aggregation and constants its authors published; every
part may be set otherwise. Free of JAX: the class is named by its place and loaded by ``registry``.
Sources and formulas stand in the classes' modules; docs/objectives.md has the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from trainer.objective.advantage import AdvantageKind

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "prompt_mean", "fixed"]
KNOBS = ("clip_low", "clip_high", "dual_clip", "cap", "quadratic", "importance", "beta")
KNOBS += ("gamma", "gae_lambda", "value_clip", "critic_lr")
"""Constants that only some objectives have."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a name stands for."""

    surrogate: str
    """``module:Class`` under ``trainer.objective``."""
    advantage: AdvantageKind = "mean"
    aggregation: Aggregation = "token_mean"
    knobs: Mapping[str, Any] = field(default_factory=dict)
    correction: Literal["auto", "on", "own", "none"] = "auto"
    """``own``: the surrogate's ratio is taken against mu; ``none``: nothing to correct, offline."""
    behaviour_cap: float = 2.0
    kl_coef: float = 0.0
    kl_in: Literal["loss", "reward"] = "loss"
    preference: Literal["", "dpo", "kto"] = ""
    """Advantages come from the policy's own log-probs (``trainer.preference``)."""


PPO = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}

RECIPES: dict[str, Recipe] = {
    "cispo": Recipe(
        surrogate="cispo:Cispo",
        advantage="mean_batch_std",
        aggregation="prompt_mean",
        knobs={"cap": 5.0},
    ),
    "aipo": Recipe(surrogate="aipo:Aipo", knobs={"cap": 5.0}, correction="own"),
    "grpo": Recipe(
        surrogate="grpo:Grpo", advantage="mean_std", aggregation="sequence_mean", knobs=PPO
    ),
    "dr_grpo": Recipe(surrogate="grpo:Grpo", aggregation="fixed", knobs=PPO),
    "dapo": Recipe(surrogate="grpo:Grpo", advantage="mean_std", knobs=PPO | {"clip_high": 0.28}),
    "lite_ppo": Recipe(surrogate="grpo:Grpo", advantage="mean_batch_std", knobs=PPO),
    "decoupled_ppo": Recipe(
        surrogate="grpo:Grpo", advantage="mean_std", knobs=PPO, correction="on", behaviour_cap=5.0
    ),
    "ppo": Recipe(
        surrogate="grpo:Grpo",
        advantage="gae",
        knobs=PPO | {"gamma": 1.0, "gae_lambda": 0.95, "value_clip": 0.2, "critic_lr": 1e-5},
        kl_in="reward",
    ),
    "reinforce_pp": Recipe(surrogate="grpo:Grpo", advantage="batch", knobs=PPO, kl_in="reward"),
    "gspo": Recipe(
        surrogate="gspo:Gspo",
        advantage="mean_std",
        aggregation="sequence_mean",
        knobs={"clip_low": 3e-4, "clip_high": 4e-4},
    ),
    "gmpo": Recipe(
        surrogate="gmpo:Gmpo",
        advantage="mean_std",
        aggregation="sequence_mean",
        knobs={"clip_low": 0.4, "clip_high": 0.4},
    ),
    "sapo": Recipe(surrogate="sapo:Sapo", advantage="mean_std", aggregation="sequence_mean"),
    "dppo": Recipe(
        surrogate="dppo:Dppo",
        knobs={"clip_low": 0.2, "clip_high": 0.2, "quadratic": 1e-3},
        correction="own",
    ),
    "minirl": Recipe(
        surrogate="minirl:MiniRl",
        aggregation="sequence_sum",
        knobs={"clip_low": 0.2, "clip_high": 0.27, "cap": 5.0},
        correction="own",
    ),
    "reinforce": Recipe(surrogate="reinforce:Reinforce", knobs={"importance": "none"}),
    "rlax": Recipe(
        surrogate="reinforce:Reinforce",
        aggregation="sequence_sum",
        knobs={"importance": "sequence"},
    ),
    "rloo": Recipe(
        surrogate="reinforce:Reinforce",
        advantage="rloo",
        aggregation="sequence_sum",
        knobs={"importance": "none"},
        kl_in="reward",
    ),
    "sft": Recipe(
        surrogate="reinforce:Reinforce",
        advantage="one",
        knobs={"importance": "none"},
        correction="none",
    ),
    "rft": Recipe(
        surrogate="reinforce:Reinforce",
        advantage="accepted",
        knobs={"importance": "none"},
        correction="none",
    ),
    "distill": Recipe(
        surrogate="reinforce:Reinforce",
        advantage="zero",
        knobs={"importance": "token"},
        kl_coef=1.0,
        kl_in="reward",
    ),
    "dpo": Recipe(
        surrogate="reinforce:Reinforce",
        advantage="zero",
        knobs={"importance": "none", "beta": 0.1},
        correction="none",
        preference="dpo",
    ),
    "kto": Recipe(
        surrogate="reinforce:Reinforce",
        advantage="zero",
        knobs={"importance": "none", "beta": 0.1},
        correction="none",
        preference="kto",
    ),
}
