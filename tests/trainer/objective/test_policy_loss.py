"""Every objective against its published loss: finite differences of it are our gradient."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.trainer.objective import published
from tests.trainer.objective.sampled_tokens import (
    DENOMINATOR,
    SHAPE,
    gradient_of,
    loss_of,
    make_tokens,
)
from trainer.objective.aipo import Aipo
from trainer.objective.cispo import Cispo
from trainer.objective.composite import Composite
from trainer.objective.config import ObjectiveConfig
from trainer.objective.correction import BehaviourCorrection
from trainer.objective.dppo import Dppo
from trainer.objective.gmpo import Gmpo
from trainer.objective.grpo import Grpo
from trainer.objective.gspo import Gspo
from trainer.objective.minirl import MiniRl
from trainer.objective.recipes import RECIPES
from trainer.objective.registry import build_objective
from trainer.objective.reinforce import Reinforce
from trainer.objective.sapo import Sapo


def with_correction(**settings):
    return Composite(surrogate=Grpo(), correction=BehaviourCorrection(**settings))


def c(t):
    return published.ratio(t.old, t.behaviour)


def c_of(t, how):
    return np.exp(published.rows(t, t.old - t.behaviour, how))


TWINS = {
    "grpo": (Grpo(), published.ppo()),
    "dapo": (Grpo(clip_high=0.28), published.ppo(high=0.28)),
    "dual clip": (Grpo(dual_clip=1.3), published.ppo(dual=1.3)),
    "cispo": (Cispo(cap=1.5), published.cispo(1.5)),
    "aipo": (Aipo(cap=1.3), published.aipo(1.3)),
    "reinforce": (Reinforce(), published.reinforce("none")),
    "reinforce, token": (Reinforce(importance="token"), published.reinforce("token")),
    "rlax": (Reinforce(importance="sequence"), published.reinforce("sequence")),
    "gspo": (Gspo(clip_low=0.05, clip_high=0.2), published.gspo(0.05, 0.2)),
    "gmpo": (Gmpo(), published.gmpo(0.4)),
    "dppo": (Dppo(quadratic=0.1), published.dppo(0.2, 0.2, 0.1)),
    "minirl": (MiniRl(cap=1.5), published.minirl(0.2, 0.27, 1.5)),
    "sapo": (Sapo(), published.sapo(1.0, 1.05)),
    "tis": (
        with_correction(cap=1.4),
        published.corrected(published.ppo(), lambda t: np.minimum(c(t), 1.4)),
    ),
    "icepop": (
        with_correction(mode="mask", floor=0.5, cap=2.0),
        published.corrected(published.ppo(), lambda t: c(t) * ((c(t) >= 0.5) & (c(t) <= 2))),
    ),
    "sequence tis": (
        with_correction(level="sequence", cap=3.0),
        published.corrected(published.ppo(), lambda t: np.minimum(c_of(t, np.sum), 3.0)),
    ),
    "geometric mis": (
        with_correction(mode="mask", level="geometric", floor=0.9, cap=1.5),
        published.corrected(
            published.ppo(),
            lambda t: np.where(
                (c_of(t, np.mean) >= 0.9) & (c_of(t, np.mean) <= 1.5), c_of(t, np.mean), 0.0
            ),
        ),
    ),
    "deepseek mask": (
        Composite(surrogate=Grpo(), off_policy_delta=-0.1),
        published.corrected(
            published.ppo(),
            lambda t: ~((published.rows(t, t.behaviour - t.theta) > -0.1) & (t.advantages < 0)),
        ),
    ),
}
WHOLE_SEQUENCE = ("gspo", "gmpo")
"""Their Agg is one number for a sequence, as [objective] aggregation makes it."""


@pytest.fixture(params=TWINS)
def case(request):
    tokens = make_tokens()
    if request.param in WHOLE_SEQUENCE:
        count = np.maximum(tokens.mask.sum(axis=1, keepdims=True), 1)
        tokens = tokens._replace(scales=np.broadcast_to(1 / count, SHAPE))
    return (*TWINS[request.param], tokens)


def slopes(loss, t, step=1e-6):
    """Central differences of a published loss, token by token, in float64."""
    out = np.zeros(SHAPE)
    for at in np.ndindex(SHAPE):
        moved = np.zeros(SHAPE)
        moved[at] = step
        out[at] = (loss(t, t.theta + moved) - loss(t, t.theta - moved)) / (2 * step)
    return out


def test_the_gradient_is_that_of_the_published_loss(case):
    objective, twin, tokens = case
    expected = slopes(twin, tokens)
    assert np.abs(expected).max() > 1e-3
    np.testing.assert_allclose(gradient_of(objective, tokens), expected, atol=2e-6)


def test_the_value_is_that_of_the_unified_form(case):
    """-sum Agg IS A log pi, with IS read off the published gradient: IS = slope / (Agg A)."""
    objective, twin, tokens = case
    if isinstance(objective, Dppo):  # has a term beside the form
        return
    expected = np.sum(slopes(twin, tokens) * tokens.theta)
    np.testing.assert_allclose(loss_of(objective, tokens)[0], expected, rtol=2e-5, atol=1e-6)


def test_masked_tokens_are_never_read(case):
    """Not even NaN: 0 * NaN would poison the sum, and its gradient."""
    objective, _, tokens = case
    poisoned = [np.where(tokens.mask, x, np.nan) for x in tokens[:7]]
    poisoned = type(tokens)(*poisoned, tokens.mask, tokens.sequences)
    for a, b in zip(loss_of(objective, tokens)[1], loss_of(objective, poisoned)[1], strict=True):
        np.testing.assert_array_equal(a, b)
    assert np.isfinite(gradient_of(objective, poisoned)).all()


def test_huge_log_ratios_stay_finite(case):
    objective, _, tokens = case
    far = tokens.theta - 1e4
    assert np.isfinite(loss_of(objective, tokens._replace(old=far, behaviour=far))[0])


def test_numbers_of_sequences_do_not_matter(case):
    """Only which tokens share one: a packer may number and order them as it likes."""
    objective, _, tokens = case
    renamed = tokens._replace(sequences=20 - 7 * tokens.sequences)
    np.testing.assert_allclose(
        gradient_of(objective, tokens), gradient_of(objective, renamed), atol=1e-7
    )


ON_POLICY = make_tokens()._replace(old=make_tokens().theta, behaviour=make_tokens().theta)


@pytest.mark.parametrize(
    "name", [n for n, r in RECIPES.items() if not r.preference and r.surrogate != "dppo:Dppo"]
)
def test_on_policy_all_are_reinforce(name):
    """At theta = old = mu every ratio is 1: what differs is advantage and aggregation alone."""
    objective = build_objective(ObjectiveConfig(name=name), 1)
    np.testing.assert_allclose(
        gradient_of(objective, ON_POLICY), gradient_of(Reinforce(), ON_POLICY), atol=1e-6
    )


def test_reductions_between_objectives():
    tokens = make_tokens()
    engine_is_old = tokens._replace(behaviour=tokens.old)
    wide = 1e6
    for one, other, at in (
        (Aipo(cap=wide), Reinforce(importance="token"), engine_is_old),
        (Cispo(cap=wide), Reinforce(importance="token"), tokens),
        (Grpo(clip_low=1.0, clip_high=wide), Reinforce(importance="token"), tokens),
        (MiniRl(clip_low=1.0, clip_high=wide, cap=wide), Aipo(cap=wide), tokens),
        (Dppo(clip_low=wide, clip_high=wide, quadratic=0.0), Aipo(cap=wide), tokens),
        (with_correction(cap=wide), Grpo(), engine_is_old),
        (Composite(surrogate=Grpo(), correction=BehaviourCorrection(cap=5.0)),
         Grpo(), engine_is_old),
    ):  # fmt: skip
        np.testing.assert_allclose(gradient_of(one, at), gradient_of(other, at), atol=1e-6)


@pytest.mark.parametrize(
    ("correction", "max_lag", "corrected"),
    [("auto", 0, False), ("auto", 1, True), ("on", 0, True), ("never", 3, False)],
)
def test_the_behaviour_correction_is_on_as_soon_as_rollouts_may_lag(correction, max_lag, corrected):
    for name, recipe in RECIPES.items():
        config = ObjectiveConfig(name=name, behaviour_correction=correction)
        found = build_objective(config, max_lag).correction is not None
        if recipe.correction == "auto":
            assert found == corrected, name
        elif recipe.correction == "on":
            assert found == (correction != "never")
        else:
            assert not found


def test_terms_beside_the_form_reach_the_gradient():
    """Every coefficient above zero moves the gradient by its own amount."""
    tokens = make_tokens()
    plain = gradient_of(Composite(surrogate=Grpo()), tokens)
    agg = np.where(tokens.mask, tokens.scales, 0.0) / DENOMINATOR
    drift = tokens.theta - tokens.reference
    kl = gradient_of(Composite(surrogate=Grpo(), kl_coef=0.3, kl_estimator="k2"), tokens)
    np.testing.assert_allclose(kl - plain, 0.3 * agg * drift, atol=1e-6)
    weighted = Composite(surrogate=Reinforce(importance="token"), kl_coef=0.3, kl_weighted=True)
    base = gradient_of(Composite(surrogate=Reinforce(importance="token")), tokens)
    r = published.ratio(tokens.theta, tokens.old)
    np.testing.assert_allclose(
        gradient_of(weighted, tokens) - base, 0.3 * agg * r * drift, atol=1e-6
    )
    entropy = jax.grad(
        lambda h: loss_of(
            Composite(surrogate=Grpo(), entropy_coef=0.2), tokens._replace(entropy=h)
        )[0]
    )(jnp.asarray(tokens.entropy))
    np.testing.assert_allclose(entropy, -0.2 * agg, atol=1e-6)
