"""A small world around the real admission functions, for exhaustive exploration.

A ``World`` is everything that outlives a process (control state, records, ledger, LATEST) and
everything that does not (controllers, queues, what pipelines work on, the trainer). ``moves`` lists
what can happen next; faults are paid from a budget so that the world stays finite. The decisions
are those of ``pipelines.controller.state`` and ``infra.admission``; only the storage around them is
a model. Time does not exist: a lease ends when a move says so (``Signals.dead``).

What a worker samples between delivery and commit has some version between the admission's
``min_version`` and what is published at commit; choosing it at commit covers every stale worker.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from infra import admission
from infra.contracts import ids
from infra.contracts.manifests import ControlState, Flight, GroupEntry
from infra.run_config import AdmissionConfig
from pipelines.controller import state as control

RUN, SOURCE, LEASE = "model", "prompts", 1.0


class Budget(NamedTuple):
    """How many faults of each kind may still happen."""

    bad: int = 0
    """Groups that end rejected or failed."""
    late: int = 0
    """Leases that end although the group is on its way."""
    lose: int = 0
    """Messages or results lost with a pipeline process."""
    twice: int = 0
    """Deliveries that are repeated."""
    crash: int = 0
    """Controller crashes, at any point."""
    takeover: int = 0
    """Second controllers started while the first lives."""
    trainer_crash: int = 0
    damage: int = 0
    """Accepted copies found damaged before a step takes them."""


SOUND = Budget()


class Record(NamedTuple):
    """What is committed of one group."""

    version: int = -1
    """Policy version of the accepted copy that readers prefer; -1: none."""
    rejected: bool = False
    failed: bool = False


class Controller(NamedTuple):
    """One controller process; ``todo`` is what its current pass still has to do."""

    memory: tuple
    """The control state it believes to be stored."""
    phase: str = "idle"
    looked: tuple | None = None
    """(states of its flights, waiting groups, steps) as it read them; the version comes later."""
    planned: tuple | None = None
    publish: tuple[tuple, ...] = ()
    give_up: tuple[int, ...] = ()
    done: bool = False
    queue: frozenset[int] = frozenset()


class World(NamedTuple):
    stored: tuple
    controllers: tuple[Controller, ...]
    delivered: frozenset[int]
    records: tuple[Record, ...]
    ledger: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    """Per step: admission indices trained, and dropped."""
    published: int
    trainer: tuple | None
    """None: down. ("idle",), ("read", flights, next index, index), ("computing",)."""
    budget: Budget
    seen: tuple[tuple | None, ...]
    """Per admission index what its first message said, apart from the attempt (a ghost)."""
    done: str = ""


class Broken(AssertionError):
    """A safety property does not hold."""


Choose = Callable[..., admission.StepChoice]


@dataclass(frozen=True, kw_only=True, eq=False)
class Setting:
    """Parameters of one exploration; the last block breaks something on purpose."""

    config: AdmissionConfig
    updates: int
    budget: Budget
    prompts: int = 0
    """Size of a prompt set that is gone through once; 0: endless."""
    atomic: bool = False
    """Smaller: a controller decides and persists in one move, the trainer reads and chooses."""

    split: bool = False
    """Larger: a controller reads the index, and only later the published version."""
    failures: bool = False
    """Pipelines may also commit a group to ``failures/``; otherwise only the controller does."""

    controller_config: AdmissionConfig | None = None
    choose: Choose = admission.choose_step
    publish_first: bool = False
    index_first: bool = False

    def draw(self, cursor: int, retired: object) -> tuple[int, str] | None:
        exhausted = self.prompts and cursor >= self.prompts
        return None if exhausted else (cursor, f"prompt-{cursor % 3}")


def initial(setting: Setting) -> World:
    state = control.start(None, run=RUN, prompts_digest="", now=0.0, lease_secs=LEASE)
    stored = pack(state)
    return World(
        stored=stored,
        controllers=(Controller(memory=stored),),
        delivered=frozenset(),
        records=(),
        ledger=(),
        published=0,
        trainer=("idle",),
        budget=setting.budget,
        seen=(),
    )


def pack(state: ControlState) -> tuple:
    """The parts of a control state that can differ, hashable."""
    flights = tuple(
        (f.admission_index, f.min_version, f.attempt, f.position) for f in state.flights
    )
    return (
        state.epoch,
        state.next_index,
        flights,
        state.cursors.get(SOURCE, 0),
        state.untrainable_streak,
        state.steps_seen,
        state.stop_reason,
    )


@cache
def unpack(packed: tuple) -> ControlState:
    epoch, next_index, flights, cursor, streak, steps, reason = packed
    return ControlState(
        run=RUN,
        epoch=epoch,
        next_index=next_index,
        flights=tuple(map(flight, flights)),
        cursors={SOURCE: cursor},
        untrainable_streak=streak,
        steps_seen=steps,
        stop_reason=reason,
        draining=bool(reason),
    )


@cache
def group(index: int, position: int) -> str:
    return ids.group_id(RUN, f"prompt-{position % 3}", index)


@cache
def flight(packed: tuple) -> Flight:
    index, version, attempt, position = packed
    return Flight(
        admission_index=index,
        group_id=group(index, position),
        min_version=version,
        attempt=attempt,
        leased_until=LEASE,
        position=position,
    )


@cache
def entry(index: int, position: int, version: int) -> GroupEntry:
    return GroupEntry(
        group_id=group(index, position),
        admission_index=index,
        prompt_id="",
        rollouts=1,
        oldest_version=version,
        newest_version=version,
        reward_mean=0.5,
        pass_rate=0.5,
        tokens=1,
    )


def index_of(world: World) -> tuple[str, ...]:
    """State of every group by what is committed (the twice-committed rules); "" in flight."""
    return _index(world.records, world.ledger)


@cache
def _index(records: tuple[Record, ...], ledger: tuple) -> tuple[str, ...]:
    by_ledger = {i: "trained" for step, _ in ledger for i in step}
    by_ledger |= {i: "dropped" for _, dropped in ledger for i in dropped}
    return tuple(by_ledger.get(i) or _by_record(record) for i, record in enumerate(records))


def _by_record(record: Record) -> str:
    if record.version >= 0:
        return "waiting"
    return "rejected" if record.rejected else "failed" if record.failed else ""


def waiting(world: World) -> tuple[tuple[int, int, int], ...]:
    """(admission index, position, policy version) of waiting groups."""
    return tuple(
        (i, world.seen[i][1], world.records[i].version)
        for i, state in enumerate(index_of(world))
        if state == "waiting"
    )


def spend(world: World, kind: str) -> Budget:
    left = getattr(world.budget, kind)
    return world.budget._replace(**{kind: left - 1})


def with_record(world: World, index: int, record: Record) -> tuple[Record, ...]:
    return (*world.records[:index], record, *world.records[index + 1 :])


def setting(
    groups: int, lag: int, updates: int, *, every: int = 1, stale: str = "wait", refill: int = 99,
    attempts: int = 2, budget: Budget = SOUND, **more: object,
) -> Setting:  # fmt: skip
    config = AdmissionConfig(
        groups_per_step=groups, max_lag=lag, publish_every=every, on_stale=stale,
        lease_secs=LEASE, max_attempts=attempts, max_refill=refill,
    )  # fmt: skip
    return replace(Setting(config=config, updates=updates, budget=budget), **more)
