"""From ``[objective]`` to the objective the step is compiled for."""

from __future__ import annotations

import dataclasses
import importlib

from trainer.objective.composite import Composite
from trainer.objective.config import ObjectiveConfig
from trainer.objective.correction import BehaviourCorrection
from trainer.objective.policy_loss import Objective
from trainer.objective.recipes import RECIPES


def build_objective(config: ObjectiveConfig, max_lag: int) -> Composite:
    """Return the configured objective, with its behaviour correction where one is due."""
    correction = None
    if config.corrects(max_lag):
        correction = BehaviourCorrection(
            mode=config.behaviour_mode,
            level=config.behaviour_level,
            floor=config.behaviour_floor,
            cap=config.behaviour_cap,
        )
    return Composite(
        surrogate=_surrogate(config),
        correction=correction,
        off_policy_delta=config.off_policy_delta,
        kl_coef=config.kl_coef if config.kl_in == "loss" else 0.0,
        kl_estimator=config.kl_estimator,
        kl_weighted=config.kl_weighted,
        entropy_coef=config.entropy_coef,
    )


def _surrogate(config: ObjectiveConfig) -> Objective:
    """The recipe's class with those of its constants that the configuration holds."""
    module, name = RECIPES[config.name].surrogate.split(":")
    made = getattr(importlib.import_module(f"trainer.objective.{module}"), name)
    knobs = RECIPES[config.name].knobs
    names = {f.name for f in dataclasses.fields(made)}
    return made(**{knob: getattr(config, knob) for knob in knobs if knob in names})
