"""FilterGroups: the decision on every scored group. Rejects and failures are data too."""

from __future__ import annotations

from collections.abc import Iterator

import apache_beam as beam
from apache_beam.metrics import Metrics
from apache_beam.pvalue import PCollection

from curation.judge import decide_group
from infra.contracts.records import Group
from transforms import coders  # noqa: F401 (registers them)
from transforms.parts import Parts, StageSettings, parts_of


def decide(group: Group, parts: Parts) -> Group:
    """Decide where the group goes and count it under its decision and reason."""
    group = decide_group(group, parts.recipe)
    assert group.decision is not None
    counts = {f"pipeline/filter/{group.decision.value}": 1.0}
    if group.reason:
        counts[f"pipeline/filter/reason_{group.reason}"] = 1.0
    parts.metrics.observe(counts)
    return group


class _Decide(beam.DoFn):
    def __init__(self, settings: StageSettings) -> None:
        self._settings = settings

    def process(self, group: Group) -> Iterator[Group]:
        decided = decide(group, parts_of(self._settings))
        Metrics.counter("headrace", f"groups_to_{decided.decision}").inc()
        yield decided


class FilterGroups(beam.PTransform):
    """Give every group its decision; all of them go on, to the folder it names."""

    def __init__(self, settings: StageSettings) -> None:
        super().__init__()
        self._settings = settings

    def expand(self, groups: PCollection[Group]) -> PCollection[Group]:
        return groups | "Decide" >> beam.ParDo(_Decide(self._settings)).with_output_types(Group)
