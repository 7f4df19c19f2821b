"""One training step in memory: groups and a state in, a state and metrics out. No I/O.

A step may make several optimizer calls (``[training] minibatches``): its groups are split evenly in
order, whole groups each. pi_old is then the policy at the start of the step, in the trainer's own
graph; for the first call that is theta itself and costs nothing, unless a credit needs its values
on the host (a KL penalty in the reward, preferences).
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from infra.contracts.errors import HeadraceError, SchemaMismatch
from infra.contracts.records import Group, Verdict
from trainer.batch import Batch
from trainer.config import TrainerConfig
from trainer.credit import global_denominator, training_sequences
from trainer.critic import Critic
from trainer.model.config import ModelConfig
from trainer.model.transformer import Params, init_params
from trainer.objective.registry import build_objective
from trainer.optimizer import build_optimizer
from trainer.optimizer_call import OptimizerCall
from trainer.packing import PackingConfig, pack
from trainer.policy_credit import gae_advantages, penalised_advantages, token_penalties
from trainer.preference import preference_advantages
from trainer.state import TrainState, new_state
from trainer.step import StepMetrics, StepSettings, build_token_logprobs, build_train_step


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What one step came to: values by metric name, and seconds by phase."""

    metrics: dict[str, float]
    seconds: dict[str, float]


class Learner:
    """The compiled step of one configuration.

    Args:
        model: shape of the model.
        config: objective, optimizer, packing.
        reference: parameters of pi_ref, for objectives that have one; of this model's shape.
        timer: monotonic seconds, for the phases.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: TrainerConfig,
        *,
        reference: Params | None = None,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        own, training = config.own, config.own.training
        self.model = model
        self._config = config
        self._reference = reference
        self._timer = timer
        self._packing = PackingConfig(
            row_tokens=training.row_tokens,
            micro_batch_tokens=training.micro_batch_tokens,
            attention_tokens=6 * model.dim,
        )
        self._optimizer = build_optimizer(own.optimizer)
        settings = StepSettings(
            model=model,
            objective=build_objective(own.objective, config.shared.admission.max_lag),
            optimizer=own.optimizer,
            reference=own.objective.needs_reference,
            entropy=own.objective.entropy_coef > 0,
            head_tokens=training.head_tokens,
            remat=training.remat,
        )
        self._train_step = build_train_step(settings)
        self._token_logprobs = build_token_logprobs(settings)
        self._critic = Critic(model, own) if own.objective.needs_critic else None

    def new_state(self, params: Params) -> TrainState:
        """State of version 0; takes ``params`` over."""
        critic = None if self._critic is None else self._critic.new(params)
        state = new_state(params, self._optimizer, self._config.shared.run.seed)
        return state.replace(critic=critic)

    def state_shapes(self) -> TrainState:
        """Shapes and dtypes of a state, nothing allocated."""
        return jax.eval_shape(
            lambda key: self.new_state(init_params(self.model, key)), jax.random.key(0)
        )

    def learn(
        self, state: TrainState, groups: Sequence[Group], step: int
    ) -> tuple[TrainState, Learned]:
        """Make version ``step`` out of version ``step - 1``. The state given is used up.

        Raises:
            HeadraceError: loss or gradient is not finite; the state must not be kept.
        """
        started = self._timer()
        calls = self._calls(groups, step)
        packed = self._timer()
        self._before_the_step(state, calls)
        done, facts = [], []
        for call in calls:
            batch, of_call = self._before_the_call(state.params, call)
            critic = state.critic
            state, metrics = self._train_step(state.replace(critic=None), batch)
            if self._critic is not None:
                critic, loss = self._critic.step(critic, batch, call.returns, call.values)
                of_call["critic_loss"] = loss
            state = state.replace(critic=critic)
            done.append(metrics)
            facts.append(of_call)
        done = jax.device_get(done)
        seconds = {"pack": packed - started, "step": self._timer() - packed}
        metrics = _merge(done, [call.batch for call in calls]) | _of_groups(groups, step)
        metrics |= {name: float(np.mean([f[name] for f in facts])) for name in facts[0]}
        if not (math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"])):
            raise HeadraceError(
                f"step {step}: loss {metrics['loss']}, gradient norm {metrics['grad_norm']}; "
                "nothing of it was kept; lower optimizer.lr or set optimizer.clip_norm, and branch "
                "from an earlier version"
            )
        return state, Learned(metrics=metrics, seconds=seconds)

    def _calls(self, groups: Sequence[Group], step: int) -> list[OptimizerCall]:
        """One packed batch per optimizer call; credit is given over the whole step."""
        objective, count = self._config.own.objective, self._config.own.training.minibatches
        _check_vocabulary(groups, self.model.vocab)
        credited = training_sequences(groups, objective, self._config.fixed_length)
        bounds = [i * len(groups) // count for i in range(count + 1)]
        calls = []
        for start, end in itertools.pairwise(bounds):
            members = credited[start:end]
            denominator = global_denominator(members, objective.aggregation)
            batch = pack(
                [s for group in members for s in group],
                self._packing,
                denominator=1.0 if objective.preference else denominator,
                step=step,
                on_policy=start == 0,
            )
            calls.append(OptimizerCall(members, batch))
        return calls

    def _before_the_step(self, state: TrainState, calls: Sequence[OptimizerCall]) -> None:
        """Log-probs of the reference and of pi_old, values, and the credit that needs them."""
        objective = self._config.own.objective
        penalised = bool(objective.kl_coef) and objective.kl_in == "reward"
        for i, call in enumerate(calls):
            found = {}
            if objective.needs_reference:
                found["reference_logprobs"] = self._token_logprobs(self._reference, call.batch)
            if i > 0 or penalised:
                found["old_logprobs"] = self._token_logprobs(state.params, call.batch)
            call.batch = call.batch.replace(**found)
            if self._critic is not None:
                call.values = self._critic.values(state.critic["params"], call.batch)
        if penalised or self._critic is not None:
            self._credit(calls, penalised)

    def _credit(self, calls: Sequence[OptimizerCall], penalised: bool) -> None:
        """Advantages of the whole step together, as whitening wants them."""
        objective = self._config.own.objective
        groups = [group for call in calls for group in call.groups]
        penalties = [[np.zeros(s.response_ids.size) for s in group] for group in groups]
        if penalised:
            old, reference = (
                [group for call in calls for group in call.named(name)]
                for name in ("old_logprobs", "reference_logprobs")
            )
            penalties = token_penalties(groups, objective.kl_coef, old, reference)
        if self._critic is None:
            found = iter(penalised_advantages(groups, objective, penalties))
            for call in calls:
                call.credit([next(found) for _ in call.groups])
            return
        values = [group for call in calls for group in call.scattered(call.values)]
        advantages, returns = map(iter, gae_advantages(groups, objective, penalties, values))
        for call in calls:
            call.credit([next(advantages) for _ in call.groups])
            call.returns = call.gathered([next(returns) for _ in call.groups])

    def _before_the_call(
        self, params: Params, call: OptimizerCall
    ) -> tuple[Batch, dict[str, float]]:
        """Credit that changes with every update: preferences. Its metrics, too."""
        objective = self._config.own.objective
        if not objective.preference:
            return call.batch, {}
        theta = call.scattered(self._token_logprobs(params, call.batch))
        found, facts = preference_advantages(
            call.groups, objective, theta, call.named("reference_logprobs")
        )
        call.credit(found)
        return call.batch, facts


def _check_vocabulary(groups: Sequence[Group], vocab: int) -> None:
    """Refuse ids the model does not have: JAX would silently take another token's row."""
    for group in groups:
        for r in group.rollouts:
            for ids in (r.prompt_ids, r.response_ids):
                if (
                    ids is not None
                    and ids.size
                    and not 0 <= int(ids.min()) <= int(ids.max()) < vocab
                ):
                    raise SchemaMismatch(
                        f"rollout {r.rollout_id} of group {group.group_id} has token ids outside "
                        f"0..{vocab - 1}; it was sampled with another model or tokenizer"
                    )


def _merge(calls: Sequence[StepMetrics], batches: Sequence[Batch]) -> dict[str, float]:
    """Means over the step's tokens; the gap is the first look at each token."""
    weights = np.array([max(1.0, float(m.tokens)) for m in calls])
    mean = ("loss", "grad_norm", "clip_share", "importance_mean", "logprob_gap_mean")
    mean += ("behaviour_kl", "kept_mass", "learning_rate", "effective_share", "entropy")
    mean += ("reference_kl",)
    out = {n: float(np.average([getattr(m, n) for m in calls], weights=weights)) for n in mean}
    out["logprob_gap_max"] = max(float(m.logprob_gap_max) for m in calls)
    out["tokens"] = sum(float(m.tokens) for m in calls)
    out["row_tokens"] = float(sum(b.micro_batches * b.tokens[0].size for b in batches))
    out["packed_share"] = sum(int((b.segments > 0).sum()) for b in batches) / out["row_tokens"]
    return out


def _of_groups(groups: Sequence[Group], step: int) -> dict[str, float]:
    """What the records say: reward, pass rate (first scorer), lag of each rollout."""
    judgements = [j for group in groups for j in group.judgements]
    passed = [j.scores[0].verdict == Verdict.PASS for j in judgements if j.scores]
    lags = [step - 1 - r.min_version for group in groups for r in group.rollouts]
    lengths = [r.response_ids.size for group in groups for r in group.rollouts]
    return {
        "reward": _mean([j.reward for j in judgements]),
        "pass_rate": _mean(passed),
        "lag_mean": _mean(lags),
        "lag_max": float(max(lags, default=0)),
        "response_length": _mean(lengths),
        "groups": float(len(groups)),
    }


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0
