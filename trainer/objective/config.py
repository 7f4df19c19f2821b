"""[objective]: which loss, how credit is assigned, how it is summed up. Free of JAX."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from infra.config import nearest
from infra.contracts.errors import ConfigError
from trainer.objective.advantage import AdvantageKind, check_group_size
from trainer.objective.recipes import KNOBS, RECIPES, Aggregation, Recipe

POSITIVE = ("clip_low", "clip_high", "beta", "value_clip", "critic_lr")


def refuse(*checks: tuple[bool, str]) -> None:
    """Raise ``ValueError`` with the text of every check that is false."""
    problems = [text for ok, text in checks if not ok]
    if problems:
        raise ValueError("; ".join(problems))


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """A recipe by name, and what is set otherwise. What is None here takes the recipe's value, and
    holds it once built: the constants in use are those that are written down."""

    name: str = "cispo"
    advantage: AdvantageKind | None = None
    eps: float = 1e-4
    """Added to standard deviations of rewards."""
    accept_above: float = 0.0
    """Reward above which a rollout is accepted (advantage ``accepted``), or desirable (``kto``)."""
    aggregation: Aggregation | None = None
    """Sum over tokens divided by: all tokens; each sequence's tokens, then sequences; sequences;
    each group's tokens, then groups; sequences times ``fixed_length``."""
    fixed_length: int = 0
    """Tokens (aggregation ``fixed``); 0: ``sampling.max_new_tokens``."""
    clip_low: float | None = None
    clip_high: float | None = None
    dual_clip: float | None = None
    """Bound of the ratio where the advantage is negative."""
    cap: float | None = None
    """Upper bound of the weight."""
    quadratic: float | None = None
    """Coefficient of the squared log-ratio (``dppo``)."""
    importance: Literal["none", "token", "sequence"] | None = None
    """Ratio to pi_old (``reinforce``)."""
    beta: float | None = None
    """Strength of the implicit KL (``dpo``, ``kto``)."""
    gamma: float | None = None
    """Discount of a token (``ppo``)."""
    gae_lambda: float | None = None
    """1: returns minus values; 0: one step ahead (``ppo``)."""
    value_clip: float | None = None
    """How far a value moves within a step before its loss stops falling (``ppo``)."""
    critic_lr: float | None = None
    """Learning rate of the critic (``ppo``), with the optimizer's schedule."""
    behaviour_correction: Literal["auto", "on", "off", "never"] = "auto"
    """Weight tokens by pi_old / mu. ``auto``: as soon as max_lag >= 1, unless the objective's own
    ratio is taken against mu. ``off`` is refused then; ``never`` is for ablations."""
    behaviour_mode: Literal["truncate", "mask"] = "truncate"
    """What is outside the bounds is cut to them (TIS), or weighs nothing (IcePop, MIS)."""
    behaviour_level: Literal["token", "sequence", "geometric"] = "token"
    behaviour_floor: float = 0.0
    behaviour_cap: float | None = None
    off_policy_delta: float | None = None
    """Drop bad sequences with mean log(mu / pi_theta) above it (DeepSeek-V3.2)."""
    kl_coef: float | None = None
    """Of KL(pi_theta || reference); 0: none."""
    kl_in: Literal["loss", "reward"] | None = None
    kl_estimator: Literal["k1", "k2", "k3", "k3+"] | None = None
    """See ``objective.kl``; k1 in the reward, else k3+."""
    kl_weighted: bool = False
    """In the loss: weight the penalty by the objective's ratio, too."""
    reference: str = ""
    """Hugging Face folder of the reference (a teacher for ``distill``); empty: version 0."""
    entropy_coef: float = 0.0

    def __post_init__(self) -> None:
        recipe = RECIPES.get(self.name)
        if recipe is None:
            raise ValueError(f"name = '{self.name}'; {nearest(self.name, RECIPES)}")
        self._refuse_foreign(recipe)
        for key, value in self._defaults(recipe).items():
            if getattr(self, key) is None:
                object.__setattr__(self, key, value)
        refuse(
            *(
                (value is None or value > 0, f"{key} = {value}; must be positive")
                for key, value in ((k, getattr(self, k)) for k in POSITIVE)
            ),
            *(
                (value is None or 0 <= value <= 1, f"{key} = {value}; must be in [0, 1]")
                for key, value in (("gamma", self.gamma), ("gae_lambda", self.gae_lambda))
            ),
            ((self.advantage == "gae") == (self.gamma is not None),
             f"advantage = '{self.advantage}' with name = '{self.name}'; "
             "'gae' goes with 'ppo' and only with it"),
            (self.dual_clip is None or self.dual_clip > 1,
             f"dual_clip = {self.dual_clip}; must be greater than 1"),
            (self.cap is None or self.cap >= 1, f"cap = {self.cap}; at least 1"),
            (self.behaviour_cap >= 1, f"behaviour_cap = {self.behaviour_cap}; at least 1"),
            (0 <= self.behaviour_floor <= 1,
             f"behaviour_floor = {self.behaviour_floor}; must be in [0, 1]"),
            (self.eps > 0, f"eps = {self.eps}; must be positive"),
            (self.fixed_length >= 0, f"fixed_length = {self.fixed_length}; at least 0"),
            (self.kl_coef >= 0, f"kl_coef = {self.kl_coef}; must not be negative"),
            (self.entropy_coef >= 0, f"entropy_coef = {self.entropy_coef}; must not be negative"),
            (self.kl_in == "reward" or self.kl_estimator != "k1" or not self.kl_coef,
             "kl_estimator = 'k1' with kl_in = 'loss' has no gradient on average; "
             "use 'k2' or 'k3+', or kl_in = 'reward'"),
            (self.kl_in == "loss" or self.kl_estimator == "k1" or not self.kl_coef,
             f"kl_estimator = '{self.kl_estimator}' with kl_in = 'reward'; only 'k1' is a reward"),
            (not self.reference or self.needs_reference,
             f"reference = '{self.reference}', but nothing uses one; set kl_coef above 0"),
        )  # fmt: skip

    def _refuse_foreign(self, recipe: Recipe) -> None:
        foreign = [k for k in KNOBS if getattr(self, k) is not None and k not in recipe.knobs]
        known = ", ".join(recipe.knobs) or "none of these constants"
        refuse(
            *((False, f"{k} means nothing to '{self.name}', which has {known}") for k in foreign),
            (not recipe.preference or self.advantage is None,
             f"advantage = '{self.advantage}' means nothing to '{self.name}'"),
        )  # fmt: skip

    def _defaults(self, recipe: Recipe) -> dict[str, Any]:
        kl_in = self.kl_in or recipe.kl_in
        return {
            **recipe.knobs,
            "advantage": recipe.advantage,
            "aggregation": recipe.aggregation,
            "behaviour_cap": recipe.behaviour_cap,
            "kl_coef": recipe.kl_coef,
            "kl_in": kl_in,
            "kl_estimator": "k1" if kl_in == "reward" else "k3+",
        }

    @property
    def preference(self) -> str:
        """``dpo`` or ``kto``, else empty."""
        return RECIPES[self.name].preference

    @property
    def needs_reference(self) -> bool:
        """Whether a second set of parameters is read."""
        return bool(self.kl_coef) or bool(self.preference)

    @property
    def needs_critic(self) -> bool:
        """Whether values are learned beside the policy."""
        return self.advantage == "gae"

    @property
    def reads_behaviour(self) -> bool:
        """Whether rollouts must have log-probs of the policy that sampled them."""
        return RECIPES[self.name].correction != "none"

    def as_written(self) -> dict[str, Any]:
        """The name, and what differs from its recipe."""
        own = asdict(ObjectiveConfig(name=self.name))
        return {k: v for k, v in asdict(self).items() if k == "name" or v != own[k]}

    def describe(self, max_lag: int) -> str:
        """One line with the constants in use."""
        knobs = {k: getattr(self, k) for k in RECIPES[self.name].knobs}
        facts = {"advantage": self.advantage, "aggregation": self.aggregation} | knobs
        if self.corrects(max_lag):
            bounds = f"{self.behaviour_floor:g} to {self.behaviour_cap:g}"
            facts["correction"] = f"{self.behaviour_mode} {self.behaviour_level} {bounds}"
        if self.kl_coef:
            facts["kl"] = f"{self.kl_coef:g} {self.kl_estimator} in the {self.kl_in}"
        if self.entropy_coef:
            facts["entropy"] = self.entropy_coef
        parts = [f"{name} {value}" for name, value in facts.items() if value is not None]
        return f"{self.name}: {', '.join(parts)}"

    def corrects(self, max_lag: int) -> bool:
        """Whether the behaviour correction applies."""
        rule, wish = RECIPES[self.name].correction, self.behaviour_correction
        if rule in ("own", "none") or wish in ("off", "never"):
            return False
        return rule == "on" or wish == "on" or max_lag >= 1


def check_objective(config: ObjectiveConfig, n: int, max_lag: int) -> None:
    """Refuse what does not go with the rest of the run. Raises ``ConfigError``."""
    check_group_size("mean" if config.preference == "dpo" else config.advantage, n)
    if config.behaviour_correction == "on" and RECIPES[config.name].correction in ("own", "none"):
        raise ConfigError(
            f"objective.behaviour_correction = 'on' means nothing to '{config.name}': its ratio is "
            "taken against mu, or it reads no mu at all; set it to 'auto'"
        )
    corrected = not config.reads_behaviour or RECIPES[config.name].correction == "own"
    if config.behaviour_correction == "off" and max_lag >= 1 and not corrected:
        raise ConfigError(
            f"objective.behaviour_correction = 'off' with admission.max_lag = {max_lag}: older "
            "rollouts would be trained on as if they were new; set it to 'auto' (or to 'never' to "
            "study just that), or max_lag to 0"
        )
