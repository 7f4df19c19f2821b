"""``headrace evaluate``: pass rates of one version on held-out prompts.

The composite of the stream, bounded, on ``FnApiRunner``: greedy and sampled responses are
generated, scored and committed as shards under ``evaluations/`` of the run, then counted. Without
an endpoint a worker of that version is started and stopped. What is finished is not made again.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from curation.pass_rate import mean_pass_at_k, wilson_interval
from infra.clock import Clock, SystemClock
from infra.contracts.errors import ConfigError, InferenceError, StorageError
from infra.contracts.ids import content_id
from infra.contracts.records import Decision, Group, Verdict
from infra.run_config import SharedConfig
from infra.shards.shard_index import ShardIndex
from infra.shards.shard_reader import read_shard
from infra.storage import run_layout
from infra.storage.object_store import ObjectStore
from infra.storage.open_run import open_run
from infra.weights.stored_weights import StoredWeights
from pipelines.beam_options import beam_flags, quiet_import
from pipelines.options import BOUNDED_RUNNER, PipelineOptions, read_run_config
from pipelines.temporary_worker import temporary_worker

if TYPE_CHECKING:
    from transforms.evaluation_tasks import EvaluationPlan
    from transforms.parts import StageSettings


def main(argv: list[str]) -> int:
    """Evaluate one version, print the result and keep it in the run."""
    args, rest = _parse(argv)
    store = open_run(args.run)
    shared, options = read_run_config(store)
    options = _with_arguments(options, args)
    version = _version(store, shared, args.version)
    with quiet_import():
        flags = beam_flags(rest, BOUNDED_RUNNER, streaming=False)
        plan = make_plan(shared, options, version)
    recipe = evaluation_recipe(options)
    digest = content_id("evaluation", plan.digest, json.dumps(dataclasses.asdict(recipe)))[:16]
    key = run_layout.evaluation(version, digest)
    found = store.read_with_token(key)
    if found is None:
        with _endpoint(args, version) as endpoint:
            settings = stage_settings(args.run, key, endpoint, shared, options)
            result = evaluate(flags, plan, settings, SystemClock())
        store.create(key, (json.dumps(result, sort_keys=True) + "\n").encode())
    else:
        result = json.loads(found[0])
    print(json.dumps(result, sort_keys=True) if args.json else describe(result))
    return 0


def make_plan(shared: SharedConfig, options: PipelineOptions, version: int) -> EvaluationPlan:
    """Decide what is asked. Raises ``ConfigError`` without held-out prompts."""
    from transforms.evaluation_tasks import EvaluationPlan, count_tasks

    plan = EvaluationPlan(
        run=shared.run.name,
        prompts=shared.prompts,
        sampling=shared.sampling,
        problems=options.evaluation.problems,
        samples=options.evaluation.samples,
        seed=options.evaluation.seed,
        version=version,
    )
    if not count_tasks(plan):
        raise ConfigError("there are no held-out prompts; set [prompts] held_out above 0")
    return plan


def evaluation_recipe(options: PipelineOptions) -> Any:
    """The run's scorers without its filters: every scored group counts."""
    names = set(options.recipe.scorers)
    kept = {name: table for name, table in options.recipe.settings.items() if name in names}
    return dataclasses.replace(options.recipe, filters=(), min_group=1, settings=kept)


def stage_settings(
    run: str, key: str, endpoint: str, shared: SharedConfig, options: PipelineOptions
) -> StageSettings:
    from transforms.parts import StageSettings

    return StageSettings(
        store_url=f"{run.rstrip('/')}/{key.removesuffix('.json')}",
        endpoint=endpoint,
        recipe=evaluation_recipe(options),
        role="evaluation",
        incarnation=f"{os.getpid()}-{int(SystemClock().now() * 1000)}",
        request_timeout_secs=options.evaluation.timeout_secs,
        retries=shared.endpoint.retries,
        hedge_share=shared.endpoint.hedge_share,
        hedge_quantile=shared.endpoint.hedge_quantile,
        segment_tokens=shared.endpoint.segment_tokens,
        client_threads=options.pipeline.client_threads,
        flush_groups=options.pipeline.flush_groups,
    )


def evaluate(
    flags: list[str], plan: EvaluationPlan, settings: StageSettings, clock: Clock
) -> dict[str, Any]:
    """Run the bounded pipeline and count. Raises as ``read_groups`` and ``summarise`` do."""
    from transforms.parts import parts_of

    started = clock.now()
    parts = parts_of(settings)
    build_and_run(flags, plan, settings)
    groups = read_groups(parts.store, plan)
    parts.recipe.close()
    parts.client.close()
    return summarise(groups, plan) | {"seconds": round(clock.now() - started, 3)}


def build_and_run(flags: list[str], plan: EvaluationPlan, settings: StageSettings) -> None:
    """Draw the graph over indices and wait until it has run."""
    with quiet_import():
        import apache_beam as beam
        from apache_beam.options.pipeline_options import PipelineOptions as BeamOptions

        from transforms.evaluation_tasks import EvaluationTasks, count_tasks
        from transforms.rollout_pipeline import RolloutPipeline

        with beam.Pipeline(options=BeamOptions(flags)) as pipeline:
            (
                pipeline
                | "Indices" >> beam.Create(range(count_tasks(plan)))
                | "EvaluationTasks" >> EvaluationTasks(plan)
                | "RolloutPipeline" >> RolloutPipeline(settings)
            )


def read_groups(store: ObjectStore, plan: EvaluationPlan) -> list[Group]:
    """Read the groups back in order of their index; an earlier, worse attempt's copies lose.

    Raises:
        InferenceError: a group could not be generated, or another version answered.
        StorageError: a group is missing.
    """
    from transforms.evaluation_tasks import count_tasks

    found: dict[int, Group] = {}
    for manifest in ShardIndex(store).poll():
        for group in read_shard(store, manifest):
            rival = found.get(group.admission_index)
            if rival is None or _rank(group, plan) > _rank(rival, plan):
                found[group.admission_index] = group
    missing = [i for i in range(count_tasks(plan)) if i not in found]
    if missing:
        raise StorageError(f"{store.url}: {len(missing)} groups of the evaluation are not there")
    groups = [found[i] for i in range(count_tasks(plan))]
    dead = [group for group in groups if not group.rollouts]
    if dead:
        raise InferenceError(f"{len(dead)} of {len(groups)} problems failed: {dead[0].error}")
    served = {version for g in groups for r in g.rollouts for version, _ in r.weights}
    if served != {plan.version}:
        raise InferenceError(
            f"version {plan.version} was asked for and {sorted(served)} answered; give the "
            "--endpoint of a worker that serves it, or none"
        )
    return groups


def summarise(groups: list[Group], plan: EvaluationPlan) -> dict[str, Any]:
    """Count: greedy pass rate with its 95 % interval, pass@k of the samples.

    Groups that no scorer could judge (an invalid gold, a broken scorer) are left out and counted.
    """
    half = len(groups) // 2 if plan.samples else len(groups)
    greedy = [_passes(group) for group in groups[:half] if group.decision is Decision.ACCEPTED]
    counts = [
        (len(group.rollouts), _passes(group))
        for group in groups[half:]
        if group.decision is Decision.ACCEPTED
    ]
    if not greedy:
        raise ConfigError(f"no problem could be judged: {groups[0].reason}: {groups[0].error}")
    powers = [2**i for i in range(plan.samples.bit_length()) if 2**i <= plan.samples]
    ks = sorted({*powers, plan.samples} - {0})
    low, high = wilson_interval(sum(greedy), len(greedy))
    return {
        "version": plan.version,
        "problems": len(greedy),
        "passes": sum(greedy),
        "pass_rate": sum(greedy) / len(greedy),
        "interval": [low, high],
        "samples": plan.samples,
        "pass_at_k": {str(k): mean_pass_at_k(counts, k) for k in ks} if counts else {},
        "unjudged": half - len(greedy),
    }


def describe(result: dict[str, Any]) -> str:
    """The result in words."""
    low, high = result["interval"]
    lines = [
        f"version {result['version']}: {result['passes']} of {result['problems']} held-out "
        f"problems pass greedily: {result['pass_rate']:.1%} (95 %: {low:.1%} to {high:.1%})"
    ]
    if result["pass_at_k"]:
        rates = ", ".join(f"pass@{k} {rate:.1%}" for k, rate in result["pass_at_k"].items())
        lines.append(f"{result['samples']} samples each: {rates}")
    if result["unjudged"]:
        lines.append(f"{result['unjudged']} problems could not be judged and are left out")
    return "\n".join(lines)


def _rank(group: Group, plan: EvaluationPlan) -> tuple[bool, bool]:
    versions = {version for rollout in group.rollouts for version, _ in rollout.weights}
    return versions == {plan.version}, group.decision is Decision.ACCEPTED


def _passes(group: Group) -> int:
    """Rollouts whose first scorer says pass."""
    return sum(j.scores[0].verdict is Verdict.PASS for j in group.judgements if j.scores)


def _parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="headrace evaluate",
        description="Pass rates on held-out prompts. Further options go to Apache Beam.",
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", help="folder of the run")
    parser.add_argument(
        "--endpoint",
        action="append",
        help="a worker that serves the version, or several; else one is started",
    )
    parser.add_argument("--version", type=int, help="policy version; the latest if not given")
    parser.add_argument("--problems", type=int, help="held-out prompts to use")
    parser.add_argument("--samples", type=int, help="sampled responses of each; 0: greedy only")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_known_args(argv)


def _with_arguments(options: PipelineOptions, args: argparse.Namespace) -> PipelineOptions:
    given = {
        name: getattr(args, name)
        for name in ("problems", "samples")
        if getattr(args, name) is not None
    }
    try:
        evaluation = dataclasses.replace(options.evaluation, **given)
    except ValueError as e:
        raise ConfigError(str(e)) from e
    return dataclasses.replace(options, evaluation=evaluation)


def _version(store: ObjectStore, shared: SharedConfig, asked: int | None) -> int:
    weights = StoredWeights(store, shared.run.name)
    versions = weights.versions()
    if not versions:
        raise ConfigError(f"{store.url}: no version is published yet; start the trainer first")
    if asked is not None and asked not in versions:
        kept = ", ".join(map(str, versions))
        raise ConfigError(f"--version {asked} is not kept in this run; there are: {kept}")
    return versions[-1] if asked is None else asked


@contextlib.contextmanager
def _endpoint(args: argparse.Namespace, version: int) -> Iterator[str]:
    if args.endpoint:
        yield ",".join(args.endpoint)
        return
    print(f"starting a worker of version {version}", file=sys.stderr)
    with temporary_worker(args.run, version, SystemClock()) as url:
        yield url
