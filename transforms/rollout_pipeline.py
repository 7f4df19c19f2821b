"""RolloutPipeline: tasks to committed shards; the same for streaming and bounded sources."""

from __future__ import annotations

import apache_beam as beam
from apache_beam.pvalue import PCollection

from infra.contracts.manifests import ShardManifest
from infra.contracts.records import GroupTask
from transforms.filter_groups import FilterGroups
from transforms.generate_rollouts import GenerateRollouts
from transforms.parts import StageSettings
from transforms.score_rollouts import ScoreRollouts
from transforms.write_shards import WriteShards


class RolloutPipeline(beam.PTransform):
    """Generate, score, filter, write. One element is one group from end to end."""

    def __init__(
        self, settings: StageSettings, *, batch_groups: int = 0, max_wait_secs: float = 1.0
    ) -> None:
        super().__init__()
        self._settings = settings
        self._batch_groups, self._max_wait_secs = batch_groups, max_wait_secs

    def expand(self, tasks: PCollection[GroupTask]) -> PCollection[ShardManifest]:
        settings = self._settings
        return (
            tasks
            | "GenerateRollouts" >> GenerateRollouts(settings)
            | "ScoreRollouts" >> ScoreRollouts(settings)
            | "FilterGroups" >> FilterGroups(settings)
            | "WriteShards"
            >> WriteShards(
                settings, batch_groups=self._batch_groups, max_wait_secs=self._max_wait_secs
            )
        )
