"""The message from the controller to the pipelines: ``{"tasks": [GroupTask, ...]}``."""

from __future__ import annotations

import json

from infra.contracts.errors import SchemaMismatch
from infra.contracts.json_codec import from_json, to_json
from infra.contracts.records import GroupTask


def encode_tasks(tasks: tuple[GroupTask, ...]) -> bytes:
    """Encode one message. Raises ``SchemaMismatch`` if a field holds what it must not."""
    return b'{"tasks":[' + b",".join(to_json(task) for task in tasks) + b"]}"


def decode_tasks(message: bytes) -> tuple[GroupTask, ...]:
    """Return the tasks of one message. Raises ``SchemaMismatch`` if it is anything else."""
    try:
        tree = json.loads(message)
        items = tree["tasks"]
        if set(tree) != {"tasks"} or not isinstance(items, list):
            raise ValueError("not an object with the list 'tasks' alone")
        tasks = tuple(from_json(GroupTask, json.dumps(item)) for item in items)
        if b"\\u" in message:  # only an escape can smuggle in text that cannot be stored
            for task in tasks:
                to_json(task)
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise SchemaMismatch(f"not a message with tasks: {type(e).__name__}: {e}") from e
    return tasks
