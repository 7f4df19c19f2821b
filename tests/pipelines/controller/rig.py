"""A run around one real controller: memory store, manual clock, hand-made pipelines and trainer."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from infra.admission import choose_step
from infra.clock import ManualClock
from infra.contracts.json_codec import from_json
from infra.contracts.manifests import ControlState, LedgerEntry
from infra.contracts.records import Decision, GroupTask, SamplingParams
from infra.heartbeats import Heartbeat
from infra.ledger import ledger
from infra.ledger.group_index import GroupIndex
from infra.metrics import MetricsWriter
from infra.prompts.order import PromptOrder
from infra.prompts.prompt_set import PromptSet, split_prompts
from infra.run_config import (
    AdmissionConfig,
    PromptsConfig,
    RunSection,
    SharedConfig,
    StopConfig,
)
from infra.shards.shard_writer import write_shard
from infra.storage import run_layout
from infra.storage.memory_store import MemoryStore
from infra.storage.object_store import ObjectStore
from infra.weights.latest_pointer import LatestPointer, advance_latest
from pipelines.controller.broker import subscription
from pipelines.controller.controller import Controller, ControllerParts
from pipelines.controller.message_queue import MessageQueue
from pipelines.controller.prompt_source import PromptSource
from tests.builders import RECIPE, RUN, make_group, make_prompt

LEASE_SECS = 60.0


def make_prompts(count: int = 20, held_out: float = 0.0) -> PromptSet:
    return split_prompts("tests", [make_prompt(i) for i in range(count)], held_out)


@dataclass(kw_only=True)
class Rig:
    """Prompts stand in file order, so admission ``i`` is ``tests.builders`` group ``i``."""

    store: ObjectStore = field(default_factory=MemoryStore)
    clock: ManualClock = field(default_factory=ManualClock)
    prompts: PromptSet = field(default_factory=make_prompts)
    groups: int = 2
    lag: int = 0
    updates: int = 3
    max_in_flight: int = 0
    epochs: int = 0
    run: str = RUN

    def config(self) -> SharedConfig:
        admission = AdmissionConfig(
            groups_per_step=self.groups,
            max_lag=self.lag,
            max_in_flight=self.max_in_flight,
            lease_secs=LEASE_SECS,
            max_attempts=2,
        )
        return SharedConfig(
            run=RunSection(name=self.run),
            prompts=PromptsConfig(source="addition"),
            sampling=SamplingParams(n=2, max_new_tokens=8),
            admission=admission,
            stop=StopConfig(updates=self.updates),
        )

    def controller(self) -> Controller:
        """A new incarnation, not started; its queue is empty."""
        self.queue = MessageQueue()
        order = PromptOrder(size=len(self.prompts.train), seed=0, shuffle=False, epochs=self.epochs)
        return Controller(
            ControllerParts(
                store=self.store,
                config=self.config(),
                source=PromptSource(self.prompts, order),
                queue=self.queue,
                clock=self.clock,
                heartbeat=Heartbeat(self.store, "controller", self.clock),
                metrics=MetricsWriter(self.store, "controller", "one", self.clock),
                processes=2,
            )
        )

    def started(self) -> Controller:
        controller = self.controller()
        controller.start()
        return controller

    def publish_version(self, version: int) -> None:
        advance_latest(self.store, LatestPointer(version=version, digest=f"digest-{version}"))

    def take(self, process: int = 0) -> list[GroupTask]:
        """Everything in the queue, as one pipeline process."""
        tasks: list[GroupTask] = []
        while message := self.queue.pull(subscription(process), self.clock.now(), 0.0):
            tasks += message.tasks
        return tasks

    def commit(self, task: GroupTask, decision: Decision, version: int | None = None) -> None:
        group = make_group(
            task.admission_index,
            decision=decision,
            version=task.min_version if version is None else version,
            attempt=task.attempt,
        )
        assert group.group_id == task.group_id
        write_shard(self.store, [group], recipe_digest=RECIPE, now=self.clock.now())

    def state(self) -> ControlState:
        return from_json(ControlState, self.store.read(run_layout.CONTROL_STATE))

    def done_word(self) -> dict[str, Any]:
        return json.loads(self.store.read(run_layout.CONTROL_DONE))

    def train(self) -> list[int]:
        """One step by the real rules, published; the admission indices it took, or none."""
        state, index = self.state(), GroupIndex(self.store)
        index.refresh()
        choice = choose_step(
            (copy.entry for copy in index.waiting.values()),
            [f for f in state.flights if index.state_of(f.group_id) is None],
            index.last_step,
            self.config().admission,
            next_index=state.next_index,
        )
        if not choice.groups:
            return []
        shards = {g: copy.manifest.data_digest for g, copy in index.waiting.items()}
        entry = LedgerEntry(
            step=index.last_step + 1,
            groups=tuple((e.group_id, shards[e.group_id]) for e in choice.groups),
            dropped=choice.dropped,
            lag_max=choice.lag_max,
            incarnation="trainer",
            settings_digest="settings",
            created_at=self.clock.now(),
        )
        assert ledger.append(self.store, entry)
        self.publish_version(entry.step)
        return [e.admission_index for e in choice.groups]
