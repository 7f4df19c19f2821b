"""One optimizer call: ``train_step(state, batch) -> (state, metrics)``, pure and jitted.

Micro-batches accumulate gradients of a sum over a global denominator, so cutting them differently
changes nothing but rounding. The loop over them has a traced length: steps with more or fewer
micro-batches share one compilation. Old log-probs come from ``token_logprobs``, the same graph.
"""

from __future__ import annotations

from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
import optax

from trainer.batch import Batch
from trainer.config import OptimizerConfig
from trainer.model.config import ModelConfig
from trainer.model.transformer import Params, head_logits, hidden_states
from trainer.objective.policy_loss import LossSums, Objective, Tokens, policy_loss
from trainer.optimizer import build_optimizer, learning_rate
from trainer.state import TrainState


@flax.struct.dataclass
class StepMetrics:
    """Of one optimizer call; means are over its trainable tokens. float32 scalars."""

    loss: jax.Array
    grad_norm: jax.Array
    """Before clipping."""
    learning_rate: jax.Array
    tokens: jax.Array
    """Trainable tokens."""
    clip_share: jax.Array
    """Share of tokens whose weight a clip or cap changed."""
    importance_mean: jax.Array
    effective_share: jax.Array
    """(sum IS)^2 / (tokens * sum IS^2): the effective sample size as a share; 1 on policy."""
    entropy: jax.Array
    """Mean -log pi_theta of the sampled tokens: an estimate of the policy's entropy."""
    logprob_gap_mean: jax.Array
    """Mean |log mu - log old|: engine against trainer."""
    logprob_gap_max: jax.Array
    behaviour_kl: jax.Array
    """Mean log mu - log old."""
    reference_kl: jax.Array
    """Mean log pi_theta - log pi_ref; 0 without a reference."""
    kept_mass: jax.Array
    """Mean probability that top-p/top-k kept: exp(raw - behaviour log-prob); 1 without them."""


@flax.struct.dataclass(frozen=True)
class StepSettings:
    """What the step is compiled for, besides shapes. Hashable."""

    model: ModelConfig = flax.struct.field(pytree_node=False)
    objective: Objective = flax.struct.field(pytree_node=False)
    optimizer: OptimizerConfig = flax.struct.field(pytree_node=False)
    reference: bool = flax.struct.field(pytree_node=False, default=False)
    """Whether batches hold log-probs of a reference."""
    entropy: bool = flax.struct.field(pytree_node=False, default=False)
    """Whether the objective reads the whole distribution's entropy: one more pass over logits."""
    head_tokens: int = flax.struct.field(pytree_node=False, default=1024)
    remat: bool = flax.struct.field(pytree_node=False, default=False)


TrainStep = Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]


def build_train_step(settings: StepSettings) -> TrainStep:
    """Return the jitted step. It takes over the state it is given (donation)."""
    optimizer = build_optimizer(settings.optimizer)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        gradients, sums, kept = accumulate(state.params, batch, settings)
        lr = learning_rate(settings.optimizer, batch.step)
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        params = jax.tree.map(lambda p, u: p - lr * u, state.params, updates)
        tokens = jnp.maximum(jnp.sum(batch.loss_mask), 1).astype(jnp.float32)
        metrics = StepMetrics(
            loss=sums.loss,
            grad_norm=optax.tree.norm(gradients),
            learning_rate=lr,
            tokens=jnp.sum(batch.loss_mask).astype(jnp.float32),
            clip_share=sums.clipped / tokens,
            importance_mean=sums.importance / tokens,
            effective_share=sums.importance**2
            / jnp.maximum(tokens * sums.importance_square, jnp.finfo(jnp.float32).tiny),
            entropy=sums.entropy / tokens,
            logprob_gap_mean=sums.gap / tokens,
            logprob_gap_max=sums.gap_max,
            behaviour_kl=sums.kl / tokens,
            reference_kl=sums.reference_kl / tokens,
            kept_mass=kept / tokens,
        )
        new = state.replace(
            params=params,
            opt_state=opt_state,
            step=batch.step,
            optimizer_step=state.optimizer_step + 1,
        )
        return new, metrics

    return jax.jit(train_step, donate_argnums=0)


def build_token_logprobs(settings: StepSettings) -> Callable[[Params, Batch], jax.Array]:
    """Return the jitted ``(params, batch) -> float32[K,M]`` log-probs of the targets."""

    def token_logprobs(params: Params, batch: Batch) -> jax.Array:
        def body(k: jax.Array, out: jax.Array) -> jax.Array:
            theta, _ = target_logprobs(params, micro_batch(batch, k), settings)
            return out.at[k].set(theta)

        return each_micro_batch(batch, body, jnp.zeros(batch.targets.shape, jnp.float32))

    return jax.jit(token_logprobs)


def accumulate(
    params: Params, batch: Batch, settings: StepSettings
) -> tuple[Params, LossSums, jax.Array]:
    """Gradient of the loss over all micro-batches, the loss sums, and the sum of kept mass."""

    def loss(params: Params, micro: Batch) -> tuple[jax.Array, tuple[LossSums, jax.Array]]:
        theta, entropy = target_logprobs(params, micro, settings)
        tokens = Tokens(
            theta=theta,
            entropy=entropy,
            old=jnp.where(micro.on_policy, theta, micro.old_logprobs),
            behaviour=micro.raw_logprobs,
            reference=micro.reference_logprobs if settings.reference else theta,
            advantages=micro.advantages,
            scales=micro.scales,
            mask=micro.loss_mask,
            sequences=micro.owners,
        )
        value, sums = policy_loss(settings.objective, tokens, micro.denominator)
        kept = jnp.where(micro.loss_mask, micro.raw_logprobs - micro.behaviour_logprobs, -jnp.inf)
        return value, (sums, jnp.sum(jnp.exp(kept)))

    gradient = jax.grad(loss, has_aux=True)

    def body(k: jax.Array, total: tuple) -> tuple:
        grads, (sums, kept) = gradient(params, micro_batch(batch, k))
        added = jax.tree.map(jnp.add, total, (grads, sums, kept))
        return (
            added[0],
            added[1]._replace(gap_max=jnp.maximum(total[1].gap_max, sums.gap_max)),
            added[2],
        )

    if batch.tokens.shape[0] == 1:
        grads, (sums, kept) = gradient(params, micro_batch(batch, 0))
        return grads, sums, kept
    zeros = jax.tree.map(jnp.zeros_like, params)
    nothing = LossSums(*(jnp.zeros((), jnp.float32),) * len(LossSums._fields))
    return each_micro_batch(batch, body, (zeros, nothing, jnp.zeros((), jnp.float32)))


def target_logprobs(
    params: Params, micro: Batch, settings: StepSettings
) -> tuple[jax.Array, jax.Array]:
    """log pi(target) of every target of one micro-batch at the record's temperature, and the
    entropy there (0 unless ``settings.entropy``); float32[M] each.

    The head runs on gathered hidden states only. Beyond ``head_tokens`` of them it goes chunk by
    chunk and recomputes logits in the backward pass: 49k logits per token are the step's largest
    array by far.
    """
    hidden = hidden_states(
        params,
        settings.model,
        micro.tokens,
        micro.positions,
        micro.segments,
        micro.prefixes,
        remat=settings.remat,
    )
    chosen = hidden.reshape(-1, hidden.shape[-1])[micro.sources]
    flat = (chosen, micro.targets, micro.temperatures)

    def logprobs(args: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        states, ids, temperatures = args
        logits = head_logits(params, settings.model, states) / temperatures[:, None]
        picked = jnp.take_along_axis(logits, ids[:, None], axis=-1)[:, 0]
        total = jax.nn.logsumexp(logits, axis=-1)
        if not settings.entropy:
            return picked - total, jnp.zeros_like(picked)
        mean = jnp.sum(jnp.exp(logits - total[:, None]) * logits, axis=-1)
        return picked - total, total - mean

    count = micro.targets.size
    if count <= settings.head_tokens:
        return logprobs(flat)
    chunks = -(-count // settings.head_tokens)
    size = -(-count // chunks)
    padded = [
        jnp.pad(x, [(0, chunks * size - count)] + [(0, 0)] * (x.ndim - 1), constant_values=1)
        for x in flat
    ]
    split = tuple(x.reshape(chunks, size, *x.shape[1:]) for x in padded)
    theta, entropy = jax.lax.map(jax.checkpoint(logprobs), split)
    return theta.reshape(-1)[:count], entropy.reshape(-1)[:count]


PER_BATCH = ("denominator", "micro_batches", "step", "on_policy")


def micro_batch(batch: Batch, k: jax.Array | int) -> Batch:
    """Micro-batch k, without the leading axis."""
    fields = batch.__dataclass_fields__
    return batch.replace(**{n: getattr(batch, n)[k] for n in fields if n not in PER_BATCH})


def each_micro_batch(batch: Batch, body: Callable, start: object) -> object:
    """Fold ``body(k, carry)`` over the real micro-batches."""
    if batch.tokens.shape[0] == 1:
        return body(0, start)
    return jax.lax.fori_loop(0, batch.micro_batches, body, start)
