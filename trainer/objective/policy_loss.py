"""The one loss all objectives share, RLAX's unified form (2512.06392, section on algorithms):

    J = sum_{i,t} sg[Agg_{i,t} * IS_{i,t}] * (sg[Adv_{i,t}] * Term1_{i,t} + Term2_{i,t}),  loss = -J

An objective fills the slots ``IS``, ``Term1`` and ``Term2``; ``Adv`` comes from ``advantage``. A
clip is a 0/1 factor inside IS, which gives the clipped surrogates' exact gradients. ``Agg`` is
``scale / denominator`` with the *global* denominator of the optimizer call, computed on the host,
so the result does not depend on micro-batches, packing or padding.

Three policies are kept apart: mu sampled the tokens (from the record), old is the trainer's own
graph at the start of the step, theta is being optimised. Ratios are exp(clip(dlogp, -20, 20)).
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

MAX_LOG_RATIO = 20.0


class TokenLogprobs(NamedTuple):
    """Log-probabilities of the sampled tokens under the three policies, float32[...]."""

    theta: Any
    old: Any
    behaviour: Any


class Slots(NamedTuple):
    """What an objective says about each token, float32[...]."""

    importance: Any
    """IS; used under stop-gradient."""
    term1: Any
    """Multiplied by the advantage; usually log pi_theta."""
    term2: Any
    """Added; 0 where there is none."""
    clipped: Any
    """bool, true where a clip or cap changed IS (a metric only)."""


class Objective(Protocol):
    """A frozen configuration with one pure method. Works on numpy arrays and JAX tracers alike."""

    def slots(self, logprobs: TokenLogprobs, advantages: Any) -> Slots:
        """Fill the slots of the unified form."""


def ratio(numerator: Any, denominator: Any) -> Any:
    """pi_a / pi_b of each token: exp(clip(log pi_a - log pi_b, -20, 20))."""
    return jnp.exp(jnp.clip(numerator - denominator, -MAX_LOG_RATIO, MAX_LOG_RATIO))


class LossSums(NamedTuple):
    """Sums over tokens; the caller divides. Scalars, float32, except where said."""

    loss: jax.Array
    """Already divided by the denominator: summing it over micro-batches gives the loss."""
    clipped: jax.Array
    """Tokens whose IS a clip or cap changed."""
    importance: jax.Array
    gap: jax.Array
    """Sum of |log mu - log old|: engine against trainer (and lag)."""
    gap_max: jax.Array
    """Largest |log mu - log old|."""
    kl: jax.Array
    """Sum of log mu - log old (k1 estimate of KL(mu || old))."""


def policy_loss(
    objective: Objective,
    logprobs: TokenLogprobs,
    advantages: jax.Array,
    scales: jax.Array,
    mask: jax.Array,
    denominator: jax.Array,
) -> tuple[jax.Array, LossSums]:
    """Loss of the given tokens and its sums; all arrays of one shape, anything where mask is false.

    Args:
        objective: fills the slots.
        logprobs: the three policies'; gradients flow through ``theta`` only.
        advantages: Adv, float32[...].
        scales: Agg's numerator, float32[...].
        mask: bool[...]; false entries are never read, not even NaN (``where`` before arithmetic).
        denominator: float32 scalar, Agg's global denominator.
    """
    sg = jax.lax.stop_gradient
    logprobs = TokenLogprobs(*(jnp.where(mask, x, 0.0) for x in logprobs))
    logprobs = TokenLogprobs(logprobs.theta, sg(logprobs.old), sg(logprobs.behaviour))
    advantages, scales = (jnp.where(mask, x, 0.0) for x in (advantages, scales))
    slots = objective.slots(logprobs, advantages)
    weight = sg(scales / denominator * slots.importance)
    loss = -jnp.sum(weight * (sg(advantages) * slots.term1 + slots.term2))
    gap = logprobs.behaviour - logprobs.old
    return loss, LossSums(
        loss=sg(loss),
        clipped=jnp.sum(jnp.where(mask, slots.clipped, False).astype(jnp.float32)),
        importance=jnp.sum(jnp.where(mask, sg(slots.importance), 0.0)),
        gap=jnp.sum(jnp.abs(gap)),
        gap_max=jnp.max(jnp.abs(gap)),
        kl=jnp.sum(gap),
    )
