"""Parts and settings for transform tests: everything in memory, the fake client, a manual clock."""

from __future__ import annotations

import itertools
from collections import Counter

from curation.recipe import RecipeConfig, build_recipe
from infra.clock import ManualClock
from infra.contracts.json_codec import to_json
from infra.contracts.records import GroupTask
from infra.inference.fake_client import FakeInferenceClient
from infra.metrics import MetricsWriter
from infra.storage.memory_store import MemoryStore
from transforms.parts import Parts, StageSettings, install_parts

RECIPE = RecipeConfig(settings={"exact_answer": {"extraction": ["first_line"]}})
_numbers = itertools.count()


class Setting:
    """One installed set of parts, and what was sent from it."""

    def __init__(self, *, respond=None, recipe: RecipeConfig = RECIPE, store=None, **settings):
        self.store = store or MemoryStore()
        self.clock = ManualClock(1000.0)
        self.hints: Counter[str] = Counter()
        self.client = FakeInferenceClient(("1\n", "2\n", "3\n", "4\n"), respond=respond)
        self.settings = StageSettings(
            store_url=f"memory:{next(_numbers)}",
            endpoint="fake:",
            recipe=recipe,
            role="rollouts-0",
            incarnation="test",
            **settings,
        )
        self.parts = Parts(
            client=self.client,
            recipe=build_recipe(recipe),
            store=self.store,
            metrics=MetricsWriter(self.store, "rollouts-0", "test", self.clock),
            clock=self.clock,
            hint=self._hint,
        )
        install_parts(self.settings, self.parts)

    def _hint(self, role: str, **payload) -> int:
        self.hints[role] += 1
        return 1


def message(*tasks: GroupTask) -> bytes:
    """One message from the controller."""
    return b'{"tasks":[' + b",".join(map(to_json, tasks)) + b"]}"
