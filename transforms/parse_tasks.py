"""ParseTasks: messages with tasks to tasks; what is late or broken is discarded and counted."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import apache_beam as beam
from apache_beam.metrics import Metrics
from apache_beam.pvalue import PCollection

from infra.contracts.errors import SchemaMismatch
from infra.contracts.records import GroupTask
from infra.contracts.task_message import decode_tasks
from transforms import coders  # noqa: F401 (registers them)
from transforms.parts import StageSettings, parts_of


class _Parse(beam.DoFn):
    expired = Metrics.counter("headrace", "tasks_expired")
    malformed = Metrics.counter("headrace", "messages_malformed")

    def __init__(self, settings: StageSettings) -> None:
        self._settings = settings

    def process(self, message: bytes) -> Iterator[GroupTask]:
        parts = parts_of(self._settings)
        try:
            tasks = decode_tasks(message)
        except SchemaMismatch as e:
            # It names no group that could be failed; its groups come again when their leases end.
            self.malformed.inc()
            parts.metrics.observe({"pipeline/parse/malformed_messages": 1})
            print(f"headrace rollouts: a message was discarded: {e}", file=sys.stderr)
            return
        now = parts.clock.now()
        for task in tasks:
            if task.expires_at <= now:
                self.expired.inc()
                parts.metrics.observe({"pipeline/parse/expired_tasks": 1})
            else:
                parts.metrics.observe({"pipeline/parse/tasks": 1})
                yield task


class ParseTasks(beam.PTransform):
    """Read messages; a task whose lease is over belongs to a later attempt by now."""

    def __init__(self, settings: StageSettings) -> None:
        super().__init__()
        self._settings = settings

    def expand(self, messages: PCollection[bytes]) -> PCollection[GroupTask]:
        return messages | "Parse" >> beam.ParDo(_Parse(self._settings)).with_output_types(GroupTask)
