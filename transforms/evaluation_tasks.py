"""EvaluationTasks: indices to tasks over held-out prompts, read inside the workers.

Only indices stand in the graph (``Create`` pickles its values into it, at 1 ms each). Index i below
the number of problems is its greedy task, the next so many are the sampled ones.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass

import apache_beam as beam
from apache_beam.pvalue import PCollection

from infra.contracts import ids
from infra.contracts.records import GroupTask, Prompt, SamplingParams
from infra.prompts.prompt_set import load_prompt_set
from infra.run_config import PromptsConfig
from transforms import coders  # noqa: F401 (registers them)

NEVER = 1e12
"""Unix seconds; no lease ends in an evaluation."""


@dataclass(frozen=True, kw_only=True)
class EvaluationPlan:
    """What is asked in one evaluation, as plain hashable values."""

    run: str
    prompts: PromptsConfig
    sampling: SamplingParams
    problems: int
    samples: int
    seed: int
    version: int

    @property
    def digest(self) -> str:
        """Names questions and sampling (not the version)."""
        names = [ids.prompt_revision(prompt) for prompt in held_out(self)]
        return ids.content_id("evaluation", repr(self.sampling), self.samples, self.seed, *names)


@functools.lru_cache(maxsize=8)
def held_out(plan: EvaluationPlan) -> tuple[Prompt, ...]:
    """The problems, the same for every version of a run."""
    return load_prompt_set(plan.prompts).held_out[: plan.problems]


def count_tasks(plan: EvaluationPlan) -> int:
    return len(held_out(plan)) * (2 if plan.samples else 1)


def task_of(plan: EvaluationPlan, index: int) -> GroupTask:
    """The task of an index: greedy ones first, then the sampled ones."""
    prompts = held_out(plan)
    greedy = index < len(prompts)
    prompt = prompts[index % len(prompts)]
    name = ids.prompt_id(prompt.messages, prompt.source)
    run = f"{plan.run}/evaluation"
    group = ids.group_id(run, name, index)
    sampling = (
        dataclasses.replace(plan.sampling, n=1, temperature=0.0, top_p=1.0, top_k=0)
        if greedy
        else dataclasses.replace(plan.sampling, n=plan.samples)
    )
    return GroupTask(
        run=run,
        group_id=group,
        admission_index=index,
        prompt_id=name,
        prompt_revision=ids.prompt_revision(prompt),
        prompt=prompt,
        sampling=sampling,
        seed=ids.group_seed(plan.seed, group),
        min_version=plan.version,
        attempt=1,
        epoch=0,
        expires_at=NEVER,
    )


class _TaskOf(beam.DoFn):
    def __init__(self, plan: EvaluationPlan) -> None:
        self._plan = plan

    def process(self, index: int) -> Iterator[GroupTask]:
        yield task_of(self._plan, index)


class EvaluationTasks(beam.PTransform):
    """Turn indices below ``count_tasks(plan)`` into tasks."""

    def __init__(self, plan: EvaluationPlan) -> None:
        super().__init__()
        self._plan = plan

    def expand(self, indices: PCollection[int]) -> PCollection[GroupTask]:
        return indices | "TaskOf" >> beam.ParDo(_TaskOf(self._plan)).with_output_types(GroupTask)
