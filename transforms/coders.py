"""How records travel between workers: canonical JSON, never pickle."""

from __future__ import annotations

from typing import Any

import apache_beam as beam
from apache_beam.coders import Coder

from infra.contracts.json_codec import from_json, to_json
from infra.contracts.manifests import ShardManifest
from infra.contracts.records import Group, GroupTask


class RecordCoder(Coder):
    """Coder of one record type; deterministic, as equal records have equal bytes."""

    record: type

    def encode(self, value: Any) -> bytes:
        return to_json(value)

    def decode(self, encoded: bytes) -> Any:
        return from_json(self.record, encoded)

    def is_deterministic(self) -> bool:
        return True

    def to_type_hint(self) -> type:
        return self.record


class GroupCoder(RecordCoder):
    record = Group


class GroupTaskCoder(RecordCoder):
    record = GroupTask


class ShardManifestCoder(RecordCoder):
    record = ShardManifest


for coder in (GroupCoder, GroupTaskCoder, ShardManifestCoder):
    beam.coders.registry.register_coder(coder.record, coder)
