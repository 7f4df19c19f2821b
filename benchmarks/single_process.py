"""The peer of `bench loop`: the same update by the same code, alternating in one process.

Same model, engine, scheduler, scorers, packing and step as the roles of a run; no Beam, no HTTP, no
shards, no ledger, no weight store, no checkpoints. What a run costs beyond this is the loop's own.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from curation.judge import judge_group
from curation.recipe import build_recipe
from infra.clock import SystemClock
from infra.config import apply_overrides, read_toml
from infra.contracts import ids
from infra.contracts.records import Decision, Group, GroupTask, Prompt, SamplingParams
from infra.inference.rollouts import group_of, request_for, rollouts_from_reply
from infra.prompts.order import PromptOrder
from infra.prompts.prompt_set import load_prompt_set
from infra.text.tokenizer import load_tokenizer
from pipelines.options import parse_options
from trainer.compile_cache import enable_compile_cache
from trainer.config import parse_trainer
from trainer.inference_worker.engine.decoder_engine import DecoderEngine
from trainer.inference_worker.scheduler import Scheduler
from trainer.learner import Learner
from trainer.model.pretrained import cache_folder, load_model, resolve_model


class SingleProcess:
    """Generation, judgement and training in turn, in this process.

    Args:
        tree: a run's configuration.
        where: its name, for messages.
        cache: for models and compiled programs.
        folder: the model, if it is not the configuration's.
        lag: how many versions before the one that is trained the rollouts are of.
        before: another one of the same model, whose engine is taken over, compiled as it is.
    """

    def __init__(
        self,
        tree: Mapping[str, Any],
        where: str,
        cache: Path,
        *,
        folder: Path | None = None,
        lag: int = 0,
        before: SingleProcess | None = None,
    ) -> None:
        self._config = parse_trainer(tree, where)
        self._recipe = build_recipe(parse_options(tree, where).recipe)
        enable_compile_cache(cache)
        folder = folder or resolve_model(self._config.own.model, cache)
        seed = self._config.shared.run.seed
        model, params = load_model(folder, seed)
        reference = (
            load_model(folder, seed)[1] if self._config.own.objective.needs_reference else None
        )
        self._learner = Learner(model, self._config, reference=reference)
        self._state = self._learner.new_state(params)
        if before is None:
            engine = DecoderEngine(model, self._config.own.inference)
            engine.warm_up()
            self._scheduler = Scheduler(
                engine, load_tokenizer(folder), self._config.own.inference, SystemClock()
            )
        else:
            self._scheduler = before._scheduler
        self._base = self._scheduler.version + 1
        """What the engine calls version 0 of this one: its versions only rise."""
        self._lag, self._kept = lag, deque[Any](maxlen=lag + 1)
        self._prompts = load_prompt_set(self._config.shared.prompts)
        self._order = PromptOrder(size=len(self._prompts.train), seed=seed)
        self._admitted = 0

    def update(self, version: int) -> dict[str, float]:
        """Make version ``version + 1``; return seconds per phase and the groups rejected."""
        started = time.perf_counter()
        offered = self._offer(version)
        groups: list[Group] = []
        generated = judged = rejected = 0
        while missing := self._config.shared.admission.groups_per_step - len(groups):
            at = time.perf_counter()
            raw = self._generate([self._next_task(offered) for _ in range(missing)])
            between = time.perf_counter()
            done = [judge_group(group, self._recipe) for group in raw]
            accepted = [group for group in done if group.decision is Decision.ACCEPTED]
            rejected += len(done) - len(accepted)
            groups += accepted
            generated += between - at
            judged += time.perf_counter() - between
        at = time.perf_counter()
        self._state, learned = self._learner.learn(self._state, groups, version + 1)
        ended = time.perf_counter()
        return {
            "generate": generated,
            "judge": judged,
            "train": ended - at,
            "total": ended - started,
            "rejected": rejected,
            "pass_rate": learned.metrics["pass_rate"],
            "gap": learned.metrics["logprob_gap_mean"],
        }

    def evaluate(self, version: int, problems: int) -> float:
        """Share of the held-out prompts that the newest parameters answer greedily."""
        offered = self._base + version
        self._scheduler.offer_weights(offered, f"v{offered}", self._state.params)
        sampling = replace(self._config.shared.sampling, n=1, temperature=0.0)
        held_out = self._prompts.held_out[:problems]
        tasks = [self._task(p, -1 - i, offered, sampling) for i, p in enumerate(held_out)]
        done = [judge_group(group, self._recipe) for group in self._generate(tasks)]
        return float(np.mean([group.judgements[0].task_reward for group in done]))

    def _offer(self, version: int) -> int:
        """Give the engine the parameters of ``lag`` versions ago; return what it calls them."""
        offered, params = self._base + version, self._state.params
        if self._lag:
            self._kept.append(jax.tree.map(jnp.copy, params))  # the step takes its own over
            params = self._kept[0]
        self._scheduler.offer_weights(offered, f"v{offered}", params)
        return offered

    def _next_task(self, version: int) -> GroupTask:
        index = self._admitted
        self._admitted += 1
        prompt = self._prompts.train[self._order.at(index)]
        return self._task(prompt, index, version, self._config.shared.sampling)

    def _task(
        self, prompt: Prompt, index: int, version: int, sampling: SamplingParams
    ) -> GroupTask:
        run = self._config.shared.run
        prompt_id = ids.prompt_id(prompt.messages, prompt.source)
        group_id = ids.group_id(run.name, prompt_id, index)
        return GroupTask(
            run=run.name,
            group_id=group_id,
            admission_index=index,
            prompt_id=prompt_id,
            prompt_revision=ids.prompt_revision(prompt),
            prompt=prompt,
            sampling=sampling,
            seed=ids.group_seed(run.seed, group_id),
            min_version=version,
            attempt=1,
            epoch=0,
            expires_at=0.0,
        )

    def _generate(self, tasks: list[GroupTask]) -> list[Group]:
        futures = [self._scheduler.submit(request_for(task, 600.0)) for task in tasks]
        while not all(future.done() for future in futures):
            self._scheduler.step()
        replies = [future.result() for future in futures]
        return [
            group_of(task, rollouts_from_reply(task, reply))
            for task, reply in zip(tasks, replies, strict=True)
        ]


def main(argv: list[str]) -> int:
    """Print one JSON line per update."""
    parser = argparse.ArgumentParser(prog="benchmarks.single_process", description=__doc__)
    parser.add_argument("config")
    parser.add_argument("--updates", type=int, default=10)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    args = parser.parse_args(argv)
    tree = apply_overrides(read_toml(args.config), args.set)
    process = SingleProcess(tree, args.config, cache_folder(os.environ))
    for version in range(args.updates):
        print(json.dumps(process.update(version)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
