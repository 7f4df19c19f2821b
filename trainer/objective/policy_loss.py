"""The one loss all objectives share, RLAX's unified form (2512.06392, section on algorithms):

    J = sum_{i,t} sg[Agg_{i,t} * IS_{i,t}] * (sg[Adv_{i,t}] * Term1_{i,t} + Term2_{i,t}),  loss = -J

An objective fills the slots ``IS``, ``Term1`` and ``Term2``; ``Adv`` comes from ``advantage``. A
clip is a 0/1 factor inside IS, which gives the clipped surrogates' exact gradients. ``Agg`` is
``scale / denominator`` with the *global* denominator of the optimizer call, computed on the host,
so the result does not depend on micro-batches, packing or padding. Regularisers that no ratio may
weight stand outside the form: ``+ Agg * Extra``.

Three policies are kept apart: mu sampled the tokens (from the record), old is the trainer's own
graph at the start of the step, theta is being optimised. Ratios are exp(clip(dlogp, -20, 20)).
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

MAX_LOG_RATIO = 20.0


class Tokens(NamedTuple):
    """The targets of one micro-batch, arrays of one shape; gradients flow through the first two."""

    theta: Any
    """float32: log pi_theta of the sampled token."""
    entropy: Any
    """float32: of pi_theta at that place; 0 where no objective asks for it."""
    old: Any
    """float32: log pi_old, the trainer's graph at the start of the step."""
    behaviour: Any
    """float32: log mu, from the record, at its temperature."""
    reference: Any
    """float32: log pi_ref; 0 where no objective asks for it."""
    advantages: Any
    """float32: Adv."""
    scales: Any
    """float32: Agg's numerator."""
    mask: Any
    """bool; the other fields hold anything where it is false."""
    sequences: Any
    """int32: tokens of one sequence share a number in [0, size). A sequence lies whole in here."""


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
    extra: Any = 0.0
    """Added without IS."""


class Objective(Protocol):
    """A frozen configuration with one pure method."""

    def slots(self, tokens: Tokens) -> Slots:
        """Fill the slots of the unified form."""


def ratio(numerator: Any, denominator: Any) -> Any:
    """pi_a / pi_b of each token: exp(clip(log pi_a - log pi_b, -20, 20))."""
    return jnp.exp(jnp.clip(numerator - denominator, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def sequence_sum(values: Any, tokens: Tokens) -> Any:
    """At each token, the sum of ``values`` over the trainable tokens of its sequence."""
    size, at = tokens.mask.size, tokens.sequences.reshape(-1)
    flat = jnp.where(tokens.mask, values, 0.0).reshape(-1)
    sums = jax.ops.segment_sum(flat, at, num_segments=size)
    return sums[at].reshape(tokens.mask.shape)


def sequence_mean(values: Any, tokens: Tokens) -> Any:
    """At each token, the mean of ``values`` over the trainable tokens of its sequence."""
    count = sequence_sum(jnp.ones(tokens.mask.shape, jnp.float32), tokens)
    return sequence_sum(values, tokens) / jnp.maximum(count, 1.0)


class LossSums(NamedTuple):
    """Sums over tokens; the caller divides. Scalars, float32, except where said."""

    loss: jax.Array
    """Already divided by the denominator: summing it over micro-batches gives the loss."""
    clipped: jax.Array
    """Tokens whose IS a clip or cap changed."""
    importance: jax.Array
    importance_square: jax.Array
    """Sum of IS^2: with the sum of IS it gives the effective sample size."""
    entropy: jax.Array
    """Sum of -log pi_theta: an estimate of the entropy that costs nothing."""
    gap: jax.Array
    """Sum of |log mu - log old|: engine against trainer (and lag)."""
    gap_max: jax.Array
    """Largest |log mu - log old|."""
    kl: jax.Array
    """Sum of log mu - log old (k1 estimate of KL(mu || old))."""
    reference_kl: jax.Array
    """Sum of log pi_theta - log pi_ref (k1 estimate of KL(theta || ref))."""


def policy_loss(
    objective: Objective, tokens: Tokens, denominator: jax.Array
) -> tuple[jax.Array, LossSums]:
    """Loss of the given tokens and its sums.

    Args:
        objective: fills the slots.
        tokens: entries with a false mask are never read, not even NaN (``where`` before
            arithmetic).
        denominator: float32 scalar, Agg's global denominator.
    """
    sg, mask = jax.lax.stop_gradient, tokens.mask
    theta, entropy, *fixed = (jnp.where(mask, x, 0.0) for x in tokens[:7])
    tokens = Tokens(theta, entropy, *map(sg, fixed), mask, tokens.sequences)
    slots = objective.slots(tokens)
    agg = tokens.scales / denominator
    terms = tokens.advantages * slots.term1 + slots.term2
    loss = -jnp.sum(sg(agg * slots.importance) * terms) - jnp.sum(agg * slots.extra)
    importance = jnp.where(mask, sg(slots.importance), 0.0)
    gap = tokens.behaviour - tokens.old
    return loss, LossSums(
        loss=sg(loss),
        clipped=jnp.sum(jnp.where(mask, slots.clipped, False).astype(jnp.float32)),
        importance=jnp.sum(importance),
        importance_square=jnp.sum(importance**2),
        entropy=-jnp.sum(sg(theta)),
        gap=jnp.sum(jnp.abs(gap)),
        gap_max=jnp.max(jnp.abs(gap)),
        kl=jnp.sum(gap),
        reference_kl=jnp.sum(sg(theta) - tokens.reference),
    )
