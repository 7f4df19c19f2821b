"""ScoreRollouts: every rollout of a group judged by the recipe, inside the pipeline's process."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import apache_beam as beam
from apache_beam.metrics import Metrics
from apache_beam.pvalue import PCollection

from curation.judge import score_group
from infra.contracts.records import Group
from transforms import coders  # noqa: F401 (registers them)
from transforms.parts import Parts, StageSettings, parts_of


def score(group: Group, parts: Parts) -> Group:
    """Judge the rollouts and note the seconds it took and every verdict."""
    started = parts.clock.now()
    group = score_group(group, parts.recipe)
    secs = parts.clock.now() - started
    verdicts = [score.verdict for j in group.judgements for score in j.scores]
    counts = {f"pipeline/score/verdict_{v}": float(verdicts.count(v)) for v in set(verdicts)}
    parts.metrics.observe({"pipeline/score/group_secs": secs, **counts})
    return dataclasses.replace(group, timings={**group.timings, "score": secs})


class _Score(beam.DoFn):
    rollouts = Metrics.counter("headrace", "rollouts_scored")

    def __init__(self, settings: StageSettings) -> None:
        self._settings = settings

    def process(self, group: Group) -> Iterator[Group]:
        scored = score(group, parts_of(self._settings))
        self.rollouts.inc(len(scored.judgements))
        yield scored


class ScoreRollouts(beam.PTransform):
    """Add judgements; failed groups pass through."""

    def __init__(self, settings: StageSettings) -> None:
        super().__init__()
        self._settings = settings

    def expand(self, groups: PCollection[Group]) -> PCollection[Group]:
        return groups | "Score" >> beam.ParDo(_Score(self._settings)).with_output_types(Group)
