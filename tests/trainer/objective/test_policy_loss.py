"""Every objective against its numpy twin, and its gradient against finite differences."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trainer.config import ObjectiveConfig
from trainer.objective.aipo import Aipo
from trainer.objective.cispo import Cispo
from trainer.objective.grpo import Grpo
from trainer.objective.policy_loss import TokenLogprobs, policy_loss
from trainer.objective.registry import OBJECTIVES, build_objective
from trainer.objective.reinforce import Reinforce

SHAPE = (3, 7)


def clipped_ratio(a, b):
    return np.exp(np.clip(a - b, -20, 20))


def grpo_weight(theta, old, mu, adv, *, low=0.2, high=0.2, cap=None):
    """The twin works token by token from the published min(...) form."""
    out = np.empty(theta.shape)
    for at in np.ndindex(theta.shape):
        r = clipped_ratio(theta[at], old[at])
        plain, clip = r * adv[at], np.clip(r, 1 - low, 1 + high) * adv[at]
        out[at] = r if plain <= clip else 0.0  # gradient of min(...)
        if cap is not None:
            out[at] *= min(clipped_ratio(old[at], mu[at]), cap)
    return out


TWINS = {
    "grpo": (Grpo(), grpo_weight),
    "grpo, clip higher": (
        Grpo(clip_high=0.28),
        lambda *a: grpo_weight(*a, high=0.28),
    ),
    "grpo, corrected": (Grpo(behaviour_cap=2.0), lambda *a: grpo_weight(*a, cap=2.0)),
    "cispo": (Cispo(cap=1.5), lambda t, o, m, a: np.minimum(clipped_ratio(t, o), 1.5)),
    "cispo, corrected": (
        Cispo(cap=1.5, behaviour_cap=1.2),
        lambda t, o, m, a: (
            np.minimum(clipped_ratio(t, o), 1.5) * np.minimum(clipped_ratio(o, m), 1.2)
        ),
    ),
    "aipo": (Aipo(rho=1.3), lambda t, o, m, a: np.minimum(clipped_ratio(t, m), 1.3)),
    "reinforce": (Reinforce(), lambda t, o, m, a: np.ones(t.shape)),
}


@pytest.fixture
def tokens():
    rng = np.random.default_rng(0)
    theta = -rng.exponential(2, SHAPE)
    return {
        "theta": theta,
        "old": theta + rng.normal(0, 0.4, SHAPE),
        "mu": theta + rng.normal(0, 0.8, SHAPE),
        "advantages": rng.normal(0, 1, SHAPE) * (rng.random(SHAPE) > 0.1),
        "scales": rng.random(SHAPE) + 0.5,
        "mask": rng.random(SHAPE) > 0.3,
    }


def loss_of(objective, t, theta=None):
    theta = t["theta"] if theta is None else theta
    return policy_loss(
        objective,
        TokenLogprobs(theta, jnp.asarray(t["old"]), jnp.asarray(t["mu"])),
        jnp.asarray(t["advantages"]),
        jnp.asarray(t["scales"]),
        jnp.asarray(t["mask"]),
        jnp.float32(11.0),
    )


@pytest.mark.parametrize("name", TWINS)
def test_loss_and_gradient_are_those_of_the_twin(name, tokens):
    objective, twin = TWINS[name]
    weight = twin(tokens["theta"], tokens["old"], tokens["mu"], tokens["advantages"])
    agg = tokens["scales"] / 11.0 * tokens["mask"]
    expected = -np.sum(agg * weight * tokens["advantages"] * tokens["theta"])
    loss, _ = loss_of(objective, tokens)
    np.testing.assert_allclose(loss, expected, rtol=2e-5)
    gradient = jax.grad(lambda theta: loss_of(objective, tokens, theta)[0])(
        jnp.asarray(tokens["theta"])
    )
    np.testing.assert_allclose(gradient, -agg * weight * tokens["advantages"], atol=1e-6)


def test_grpo_has_the_gradient_of_the_published_surrogate(tokens):
    """Finite differences of -min(r A, clip(r) A), away from the kinks."""
    t = tokens
    gradient = np.asarray(
        jax.grad(lambda theta: loss_of(Grpo(), t, theta)[0])(jnp.asarray(t["theta"]))
    )

    def surrogate(theta):
        r = clipped_ratio(theta, t["old"])
        best = np.minimum(r * t["advantages"], np.clip(r, 0.8, 1.2) * t["advantages"])
        return -np.sum(t["scales"] / 11.0 * t["mask"] * best)

    for at in np.ndindex(SHAPE):
        step = np.zeros(SHAPE)
        step[at] = 1e-6
        slope = (surrogate(t["theta"] + step) - surrogate(t["theta"] - step)) / 2e-6
        assert abs(slope - gradient[at]) < 1e-5


@pytest.mark.parametrize("name", TWINS)
def test_masked_tokens_are_never_read(name, tokens):
    """Not even NaN: 0 * NaN would poison the sum, and its gradient."""
    objective, _ = TWINS[name]
    poisoned = {k: np.where(tokens["mask"], v, np.nan) for k, v in tokens.items() if k != "mask"}
    poisoned["mask"] = tokens["mask"]
    clean, poison = loss_of(objective, tokens), loss_of(objective, poisoned)
    for a, b in zip(jax.tree.leaves(clean), jax.tree.leaves(poison), strict=True):
        np.testing.assert_array_equal(a, b)
    gradient = jax.grad(lambda theta: loss_of(objective, poisoned, theta)[0])(
        jnp.asarray(poisoned["theta"])
    )
    assert np.isfinite(gradient).all()


def test_huge_log_ratios_stay_finite(tokens):
    t = tokens | {"mu": tokens["theta"] - 1e4, "old": tokens["theta"] - 1e4}
    for objective, _ in TWINS.values():
        assert np.isfinite(loss_of(objective, t)[0])


@pytest.mark.parametrize(
    ("correction", "max_lag", "corrected"),
    [("auto", 0, False), ("auto", 1, True), ("on", 0, True), ("off", 3, False)],
)
def test_the_behaviour_correction_is_on_as_soon_as_rollouts_may_lag(correction, max_lag, corrected):
    for name in OBJECTIVES:
        config = ObjectiveConfig(name=name, behaviour_correction=correction)
        objective = build_objective(config, max_lag)
        if name != "aipo":  # corrected by construction
            assert (objective.behaviour_cap is not None) == corrected
