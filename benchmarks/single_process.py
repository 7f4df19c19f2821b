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
from collections.abc import Iterable
from pathlib import Path

from curation.judge import judge_group
from curation.recipe import build_recipe
from infra.clock import SystemClock
from infra.config import apply_overrides, read_toml
from infra.contracts import ids
from infra.contracts.records import Decision, Group, GroupTask
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
    """Generation, judgement and training in turn, in this process."""

    def __init__(self, config: str, overrides: Iterable[str], cache: Path) -> None:
        tree = apply_overrides(read_toml(config), overrides)
        self._config = parse_trainer(tree, config)
        self._recipe = build_recipe(parse_options(tree, config).recipe)
        enable_compile_cache(cache)
        folder = resolve_model(self._config.own.model, cache)
        model, params = load_model(folder, self._config.shared.run.seed)
        self._learner = Learner(model, self._config)
        self._state = self._learner.new_state(params)
        engine = DecoderEngine(model, self._config.own.inference)
        engine.warm_up()
        self._scheduler = Scheduler(
            engine, load_tokenizer(folder), self._config.own.inference, SystemClock()
        )
        self._prompts = load_prompt_set(self._config.shared.prompts)
        self._order = PromptOrder(size=len(self._prompts.train), seed=self._config.shared.run.seed)
        self._admitted = 0

    def update(self, version: int) -> dict[str, float]:
        """Make version ``version + 1``; return seconds per phase and the groups rejected."""
        started = time.perf_counter()
        self._scheduler.offer_weights(version, f"v{version}", self._state.params)
        groups: list[Group] = []
        generated = judged = rejected = 0
        while missing := self._config.shared.admission.groups_per_step - len(groups):
            at = time.perf_counter()
            raw = self._generate([self._task(version) for _ in range(missing)])
            between = time.perf_counter()
            done = [judge_group(group, self._recipe) for group in raw]
            accepted = [group for group in done if group.decision is Decision.ACCEPTED]
            rejected += len(done) - len(accepted)
            groups += accepted
            generated += between - at
            judged += time.perf_counter() - between
        at = time.perf_counter()
        self._state, _ = self._learner.learn(self._state, groups, version + 1)
        ended = time.perf_counter()
        return {
            "generate": generated,
            "judge": judged,
            "train": ended - at,
            "total": ended - started,
            "rejected": rejected,
        }

    def _task(self, version: int) -> GroupTask:
        run, index = self._config.shared.run, self._admitted
        self._admitted += 1
        prompt = self._prompts.train[self._order.at(index)]
        prompt_id = ids.prompt_id(prompt.messages, prompt.source)
        group_id = ids.group_id(run.name, prompt_id, index)
        return GroupTask(
            run=run.name,
            group_id=group_id,
            admission_index=index,
            prompt_id=prompt_id,
            prompt_revision=ids.prompt_revision(prompt),
            prompt=prompt,
            sampling=self._config.shared.sampling,
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
    process = SingleProcess(args.config, args.set, cache_folder(os.environ))
    for version in range(args.updates):
        print(json.dumps(process.update(version)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
