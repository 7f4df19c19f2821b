"""The controller's shell: read, decide (``state.advance``), persist, then act. Restartable.

The order of one pass is the point of it:

1. what operators wish; 2. the index of committed groups and the ledger; 3. the published version
(last: older counts are only too high); 4. the decision; 5. compare-and-swap of the state, which a
second controller makes fail; 6. messages and records in ``failures/``; 7. ``done.json``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from infra.clock import Clock
from infra.contracts.errors import ConfigError, DamagedObject, Fenced
from infra.contracts.json_codec import from_json, to_marker
from infra.contracts.manifests import ControlState, Flight
from infra.contracts.records import Decision, GroupTask
from infra.heartbeats import Heartbeat
from infra.inference.rollouts import group_of
from infra.ledger.group_index import GroupIndex
from infra.metrics import MetricsWriter
from infra.run_config import SharedConfig
from infra.shards.shard_writer import write_shard
from infra.storage import run_layout
from infra.storage.object_store import ObjectStore
from infra.weights.latest_pointer import read_latest
from pipelines.controller import state as control
from pipelines.controller.message_queue import MessageQueue
from pipelines.controller.prompt_source import PromptSource

POLL_SECS = 0.5
"""The fallback; shards and versions are announced by hint."""
LEASE_EXPIRED = "lease_expired"


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerParts:
    """What a controller works with."""

    store: ObjectStore
    config: SharedConfig
    source: PromptSource
    queue: MessageQueue
    clock: Clock
    heartbeat: Heartbeat
    metrics: MetricsWriter
    processes: int
    """Pipeline processes that share the messages."""


class Controller:
    """One incarnation. ``start`` takes the run over, ``turn`` makes one pass."""

    def __init__(self, parts: ControllerParts) -> None:
        self._parts = parts
        self._index = GroupIndex(parts.store)
        self._limits = control.Limits(
            admission=parts.config.admission, updates=parts.config.stop.updates
        )
        self._token: str | None = None
        self.state = ControlState(run=parts.config.run.name, epoch=0)

    def start(self) -> None:
        """Open a new epoch and publish what is in flight again: the queue died with the last one.

        Raises:
            ConfigError: the run was begun with another name or other prompts.
            Fenced: a third controller was faster.
        """
        store, source = self._parts.store, self._parts.source
        found = store.read_with_token(run_layout.CONTROL_STATE)
        stored = None
        if found is not None:
            name = f"{store.url}/{run_layout.CONTROL_STATE}"
            stored, self._token = from_json(ControlState, found[0], name=name), found[1]
            self._refuse_other_run(stored)
        self._persist(
            control.start(
                stored,
                run=self._parts.config.run.name,
                prompts_digest=source.digest,
                now=self._parts.clock.now(),
                lease_secs=self._limits.admission.lease_secs,
            )
        )
        store.delete(run_layout.CONTROL_DONE)
        self._publish(self.state.flights)

    def turn(self, dead: Iterable[str] = ()) -> bool:
        """Make one pass; True when the run is over and ``done.json`` is written.

        Args:
            dead: subscriptions whose process is known to have died.

        Raises:
            Fenced: another controller has taken over; nothing was published by this pass.
        """
        parts = self._parts
        signals = self._signals(dead)
        self._index.refresh()
        view = self._view()
        done = control.advance(
            self.state, view, signals, self._limits, parts.source.draw, parts.source.name
        )
        if done.state != self.state:
            self._persist(done.state)
        else:
            self._check_epoch()
        self._give_up(done.give_up)
        self._publish(done.publish)
        parts.queue.keep_only(f.group_id for f in self.state.flights)
        self._report(done, view)
        if done.done:
            word = {"reason": self.state.stop_reason, "version": view.version}
            parts.store.create(run_layout.CONTROL_DONE, json.dumps(word).encode())
        return done.done

    # The pieces of a pass.

    def _signals(self, dead: Iterable[str]) -> control.Signals:
        queue = self._parts.queue
        return control.Signals(
            now=self._parts.clock.now(),
            drain=self._command("drain") is not None,
            pause=self._command("pause") is not None,
            retire=self._retirements(),
            dead=frozenset().union(*(queue.taken_by(name) for name in dead)),
            queued=queue.queued(),
        )

    def _retirements(self) -> tuple[str, ...]:
        data = self._command("retire")
        if data is None:
            return ()
        try:
            prompts = json.loads(data)["prompts"]
            return tuple(str(prompt) for prompt in prompts)
        except (ValueError, TypeError, KeyError) as e:
            raise DamagedObject(
                f"{self._parts.store.url}/{run_layout.command('retire')}: expected "
                '{"prompts": [prompt id, ...]}; mend or delete it'
            ) from e

    def _command(self, name: str) -> bytes | None:
        found = self._parts.store.read_with_token(run_layout.command(name))
        return found and found[0]

    def _view(self) -> control.View:
        states = ((f.group_id, self._index.state_of(f.group_id)) for f in self.state.flights)
        latest = read_latest(self._parts.store)
        return control.View(
            ended={group_id: state for group_id, state in states if state is not None},
            waiting=tuple(copy.entry for copy in self._index.waiting.values()),
            steps=self._index.last_step,
            version=latest.version if latest else None,
        )

    def _persist(self, state: ControlState) -> None:
        token = self._parts.store.compare_and_swap(
            run_layout.CONTROL_STATE, to_marker(state), self._token
        )
        if token is None:
            raise self._fenced()
        self._token, self.state = token, state

    def _check_epoch(self) -> None:
        """Notice a successor also while there is nothing to persist."""
        found = self._parts.store.read_with_token(run_layout.CONTROL_STATE)
        if found is None or found[1] != self._token:
            raise self._fenced()

    def _fenced(self) -> Fenced:
        return Fenced(
            f"{self._parts.store.url}: another controller has taken this run over (this one had "
            f"epoch {self.state.epoch}); stop one of them"
        )

    def _publish(self, flights: Sequence[Flight]) -> None:
        for tasks in split_messages(
            tuple(map(self._task, flights)),
            processes=self._parts.processes,
            groups_per_step=self._limits.admission.groups_per_step,
        ):
            self._parts.queue.publish(tasks)

    def _task(self, flight: Flight) -> GroupTask:
        config = self._parts.config
        return self._parts.source.task(
            flight,
            run=self.state.run,
            epoch=self.state.epoch,
            run_seed=config.run.seed,
            sampling=config.sampling,
        )

    def _give_up(self, flights: Sequence[Flight]) -> None:
        """Commit groups that are out of attempts; the next pass finds them ended."""
        for flight in flights:
            task, config = self._task(flight), self._limits.admission
            group = replace(
                group_of(task, ()),
                decision=Decision.FAILED,
                reason=LEASE_EXPIRED,
                error=f"controller: no result after {task.attempt} attempts, each of at most "
                f"{config.lease_secs:g} s",
            )
            now = self._parts.clock.now()
            write_shard(self._parts.store, [group], recipe_digest="", now=now)

    def _refuse_other_run(self, stored: ControlState) -> None:
        name, digest = self._parts.config.run.name, self._parts.source.digest
        if stored.run != name:
            raise ConfigError(f"{self._parts.store.url}: holds run {stored.run!r}, not {name!r}")
        if stored.prompts_digest not in ("", digest):
            raise ConfigError(
                f"{self._parts.store.url}: was begun with other training prompts than "
                f"{self._parts.source.name} holds now; restore them or start a new run"
            )

    def _report(self, done: control.Pass, view: control.View) -> None:
        state = self.state
        word = "paused" if state.paused else "draining" if state.draining else "admitting"
        numbers = {
            "admitted": state.next_index,
            "in_flight": len(state.flights),
            "accepted": done.accepted,
            "refills": state.refills,
            "reissued": state.reissued,
            "version": view.version,
        }
        self._parts.heartbeat.beat(word, done.waiting_for, epoch=state.epoch, **numbers)
        if done.publish or done.give_up or done.done:
            named = {f"controller/admission/{name}_groups": n for name, n in numbers.items()}
            named["controller/admission/version"] = named.pop("controller/admission/version_groups")
            self._parts.metrics.emit(named)


def split_messages(
    tasks: tuple[GroupTask, ...], *, processes: int, groups_per_step: int
) -> list[tuple[GroupTask, ...]]:
    """Share tasks out evenly: at most ceil(groups_per_step / processes) to a message."""
    size = math.ceil(min(len(tasks), groups_per_step) / processes)
    return [tasks[i : i + size] for i in range(0, len(tasks), size)] if tasks else []


def run_until_done(
    controller: Controller,
    hints: Callable[[float], list[dict]],
    subscription: Callable[[int], str],
    stopped: Callable[[], bool],
) -> bool:
    """Make passes until the run is over (True) or ``stopped`` says so (False).

    Args:
        hints: waits up to so many seconds for hints, e.g. ``HintListener.wait``.
        subscription: names the subscription of a pipeline process.
    """
    dead: list[str] = []
    while not stopped():
        if controller.turn(dead):
            return True
        numbers = [hint.get("dead_subscription") for hint in hints(POLL_SECS)]
        dead = [subscription(k) for k in numbers if isinstance(k, int)]
    return False
