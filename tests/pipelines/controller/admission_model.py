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

import gc
from collections.abc import Callable, Iterator
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


def moves(world: World, setting: Setting) -> Iterator[tuple[str, World]]:
    """Everything that can happen next, with a name for the trace."""
    if not world.done:
        for k in range(len(world.controllers)):
            yield from _controller_moves(world, setting, k)
        if not world.controllers or (world.budget.takeover and len(world.controllers) == 1):
            yield _start(world)
    for index in world.delivered:
        yield from _pipeline_moves(world, setting, index)
    yield from _trainer_moves(world, setting)


def spend(world: World, kind: str) -> Budget:
    left = getattr(world.budget, kind)
    return world.budget._replace(**{kind: left - 1})


# --- the controller -------------------------------------------------------------------------


def _start(world: World) -> tuple[str, World]:
    state = control.start(
        unpack(world.stored), run=RUN, prompts_digest="", now=0.0, lease_secs=LEASE
    )
    stored = pack(state)
    again = tuple((index, version, position) for index, version, _attempt, position in stored[2])
    new = Controller(memory=stored, phase="persisted", publish=again)
    budget = spend(world, "takeover") if world.controllers else world.budget
    return (
        f"controller {state.epoch} starts",
        world._replace(stored=stored, controllers=(*world.controllers, new), budget=budget),
    )


def _controller_moves(world: World, setting: Setting, k: int) -> Iterator[tuple[str, World]]:
    me = world.controllers[k]
    name = f"controller {me.memory[0]}"
    if world.budget.crash:
        down = _become(world, k, None)
        yield f"{name} crashes ({me.phase})", down._replace(budget=spend(world, "crash"))
    for index in me.queue:
        left = _become(world, k, me._replace(queue=me.queue - {index}))
        yield f"{index} delivered", left._replace(delivered=world.delivered | {index})
    fenced = world.stored != me.memory
    if me.phase in ("idle", "planned") and fenced:
        yield f"{name} is fenced", _become(world, k, None)
    if me.phase == "idle" and setting.split:
        looked = me._replace(phase="looked", looked=_look(world, me))
        yield f"{name} reads the index", _become(world, k, looked)
    elif me.phase in ("idle", "looked"):
        for label, plan, budget in _plans(world, setting, me):
            planned = _become(world, k, plan)._replace(budget=budget)
            if not setting.atomic or plan.phase != "planned":
                yield f"{name} {label}", planned
            elif not fenced:
                yield f"{name} {label} and persists", _persist(planned, plan, k)
    elif me.phase == "persisted" or (setting.publish_first and not fenced):
        yield f"{name} publishes", _publish(world, me, k)
    elif not fenced:
        yield f"{name} persists", _persist(world, me, k)


def _become(world: World, k: int, new: Controller | None) -> World:
    """Controller ``k`` changes, or is gone."""
    rest = world.controllers[:k] + ((new,) if new else ()) + world.controllers[k + 1 :]
    return world._replace(controllers=rest)


def _plans(
    world: World, setting: Setting, me: Controller
) -> Iterator[tuple[str, Controller, Budget]]:
    """What the real pass makes of the world, with and without a lease that ends."""
    for dead, kind in [(None, ""), *_leases(world, me)]:
        plan = _plan(world, setting, me, dead)
        if plan is not None:
            over = "" if dead is None else f", lease of {dead} over"
            yield f"plans{over}", plan, spend(world, kind) if kind else world.budget
        elif me.phase == "looked" and dead is None:
            yield "has nothing to do", me._replace(phase="idle", looked=None), world.budget


def _leases(world: World, me: Controller) -> list[tuple[int, str]]:
    """Leases that may end: lost groups for free, those on their way from the budget."""
    alive = set(world.delivered).union(*(c.queue for c in world.controllers))
    alive |= {f[0] for c in world.controllers if c.phase != "idle" for f in c.publish}
    flights = [f[0] for f in me.memory[2]]
    return [(i, "" if i not in alive else "late") for i in flights
            if i not in alive or (world.budget.late and i not in me.queue)]  # fmt: skip


def _plan(world: World, setting: Setting, me: Controller, dead: int | None) -> Controller | None:
    """Run the real pass; None when it has nothing to do."""
    looked = me.looked or _look(world, me)
    queued = me.queue.intersection(f[0] for f in me.memory[2])
    plan = _pass(setting, me.memory, *looked, world.published, dead, queued)
    return plan and me._replace(phase="planned", looked=None, **plan)


def _look(world: World, me: Controller) -> tuple:
    states = index_of(world)
    ended = tuple(states[f[0]] if f[0] < len(states) else "" for f in me.memory[2])
    return ended, waiting(world), len(world.ledger)


@cache
def _pass(
    setting: Setting,
    memory: tuple,
    ended: tuple[str, ...],
    entries: tuple[tuple[int, int, int], ...],
    steps: int,
    version: int,
    dead: int | None,
    queued: frozenset[int],
) -> dict[str, object] | None:
    flights = {f[0]: group(f[0], f[3]) for f in memory[2]}
    view = control.View(
        ended={g: state for g, state in zip(flights.values(), ended, strict=True) if state},
        waiting=tuple(entry(*e) for e in entries),
        steps=steps,
        version=version,
    )
    signals = control.Signals(
        now=0.0,
        dead=frozenset(() if dead is None else {flights[dead]}),
        queued=frozenset(flights[i] for i in queued),
    )
    config = setting.controller_config or setting.config
    limits = control.Limits(admission=config, updates=setting.updates)
    plan = control.advance(unpack(memory), view, signals, limits, setting.draw, SOURCE)
    packed = pack(plan.state)
    if packed == memory and not plan.publish and not plan.give_up and not plan.done:
        return None
    return {
        "planned": packed,
        "publish": tuple((f.admission_index, f.min_version, f.position) for f in plan.publish),
        "give_up": tuple(f.admission_index for f in plan.give_up),
        "done": plan.done,
    }


def _persist(world: World, me: Controller, k: int) -> World:
    assert me.planned is not None
    phase = "idle" if not (me.publish or me.give_up or me.done) else "persisted"
    new = me._replace(memory=me.planned, phase=phase, planned=None)
    records = world.records + (Record(),) * (me.planned[1] - len(world.records))
    seen = world.seen + (None,) * (me.planned[1] - len(world.seen))
    for index, version, _attempt, position in me.planned[2]:
        if seen[index] is None:
            seen = (*seen[:index], (version, position), *seen[index + 1 :])
    world = _become(world, k, new)
    return world._replace(stored=me.planned, records=records, seen=seen)


def _publish(world: World, me: Controller, k: int) -> World:
    queue, seen = set(me.queue), list(world.seen)
    seen += [None] * (max((f[0] + 1 for f in me.publish), default=0) - len(seen))
    records = list(world.records) + [Record()] * (len(seen) - len(world.records))
    for index, version, position in me.publish:
        if seen[index] not in (None, (version, position)):
            raise Broken(f"index {index} was admitted as {seen[index]}, now {(version, position)}")
        seen[index] = (version, position)
        queue.add(index)
    for index in me.give_up:
        records[index] = records[index]._replace(failed=True)
    if me.phase == "planned":  # publish_first: persist afterwards
        new: Controller | None = me._replace(publish=(), give_up=(), queue=frozenset(queue))
    elif me.done:
        new = None
    else:
        new = Controller(memory=me.memory, queue=frozenset(queue))
    if me.phase == "planned" and not me.publish and not me.give_up:
        return _persist(world, me, k)
    return _become(world, k, new)._replace(
        records=tuple(records),
        seen=tuple(seen),
        done=me.memory[6] if me.done and me.phase == "persisted" else world.done,
    )


# --- pipelines and workers ------------------------------------------------------------------


def _pipeline_moves(world: World, setting: Setting, index: int) -> Iterator[tuple[str, World]]:
    gone = world._replace(delivered=world.delivered - {index})
    record, seen = world.records[index], world.seen[index]
    assert seen is not None
    starts = [("", gone)]
    if world.budget.twice:
        starts.append((" (and is delivered again)", world._replace(budget=spend(world, "twice"))))
    for note, start in starts:
        for version in range(seen[0], world.published + 1):
            # A second accepted copy wins if its digest is lower: either may be.
            accepted = start._replace(records=_with(start, index, record._replace(version=version)))
            yield f"{index} accepted at version {version}{note}", accepted
            if record.version >= 0:
                yield f"{index} accepted, superseded{note}", start
        if world.budget.bad:
            paid = start._replace(budget=spend(start, "bad"))
            rejected = _with(start, index, record._replace(rejected=True))
            yield f"{index} rejected{note}", paid._replace(records=rejected)
            if setting.failures:
                failed = _with(start, index, record._replace(failed=True))
                yield f"{index} failed{note}", paid._replace(records=failed)
    if world.budget.lose:
        yield f"{index} lost with its process", gone._replace(budget=spend(world, "lose"))


def _with(world: World, index: int, record: Record) -> tuple[Record, ...]:
    return (*world.records[:index], record, *world.records[index + 1 :])


# --- the trainer ----------------------------------------------------------------------------


def _trainer_moves(world: World, setting: Setting) -> Iterator[tuple[str, World]]:
    steps = len(world.ledger)
    for index, _, _ in waiting(world) if world.budget.damage else ():
        gone = world._replace(records=_with(world, index, Record(failed=True)))
        yield f"{index} is quarantined", gone._replace(budget=spend(world, "damage"))
    if world.trainer is None:
        back = world._replace(trainer=("idle",))
        yield "trainer restarts and replays", _published(back, setting, steps)
    elif world.trainer[0] == "idle" and steps < setting.updates:
        known = waiting(world) if setting.index_first else None
        read = world._replace(trainer=("read", world.stored[2], world.stored[1], known))
        if not setting.atomic:
            yield "trainer reads the flights", read
        elif (chosen := _choose(read, setting)).trainer != ("idle",):
            yield "trainer starts a step", chosen
    elif world.trainer[0] == "read":
        chosen = _choose(world, setting)
        yield ("trainer starts a step" if chosen.trainer else "trainer waits"), chosen
    elif world.trainer[0] == "computing":
        yield "trainer publishes", _published(world._replace(trainer=("idle",)), setting, steps)
        if world.budget.trainer_crash:
            down = world._replace(trainer=None, budget=spend(world, "trainer_crash"))
            yield "trainer crashes after its ledger entry", down


def _published(world: World, setting: Setting, step: int) -> World:
    every = setting.config.publish_every
    newest = step if step == setting.updates else step - step % every
    return world._replace(published=max(world.published, newest))


def _choose(world: World, setting: Setting) -> World:
    assert world.trainer is not None
    _, packed, next_index, known = world.trainer
    states = index_of(world)
    flying = [flight(f) for f in packed if states[f[0]] in ("", "waiting")]
    entries = waiting(world)
    if known is not None:
        fresh = {e[0] for e in entries}
        entries = tuple(e for e in known if e[0] in fresh)
        flying = [f for f in flying if f.admission_index not in fresh]
    known_to = [entry(*e) for e in entries]
    choice = setting.choose(
        known_to, flying, len(world.ledger), setting.config, next_index=next_index
    )
    if not choice.groups:
        return world._replace(trainer=("idle",))
    of = {e.group_id: e.admission_index for e in known_to}
    trained = tuple(e.admission_index for e in choice.groups)
    dropped = tuple(of[g] for g, _reason in choice.dropped)
    _check_step(world, setting, choice, states, trained, dropped)
    return world._replace(ledger=(*world.ledger, (trained, dropped)), trainer=("computing",))


def _check_step(
    world: World,
    setting: Setting,
    choice: admission.StepChoice,
    states: tuple[str, ...],
    trained: tuple[int, ...],
    dropped: tuple[int, ...],
) -> None:
    version, config = len(world.ledger), setting.config
    lags = [version - world.records[i].version for i in trained]
    if len(set(trained)) != config.groups_per_step or set(trained) & set(dropped):
        raise Broken(f"step takes {trained}, drops {dropped}")
    if any(states[i] != "waiting" for i in (*trained, *dropped)):
        raise Broken(f"step takes {trained}, drops {dropped} of {states}")
    if min(lags) < 0 or choice.lag_max != max(lags):
        raise Broken(f"lags {lags}, told {choice.lag_max}")
    if config.on_stale != "train" and max(lags) > config.max_lag:
        raise Broken(f"lag {max(lags)} > max_lag {config.max_lag}")
    late = sum(lag > config.max_lag for lag in lags)
    if choice.violations != late:
        raise Broken(f"{late} groups beyond max_lag, {choice.violations} counted")
    # A group accepted after its slot was given away is one too many; only then may one be dropped.
    revived = sum(r.version >= 0 and (r.rejected or r.failed) for r in world.records)
    before = sum(len(d) for _, d in world.ledger)
    if config.on_stale == "wait" and before + len(dropped) > revived:
        raise Broken(f"{dropped} dropped under 'wait', {revived} groups came back")


# --- properties of a world ------------------------------------------------------------------


def check(world: World) -> None:
    """The audit identity: every admitted group is in exactly one place, none is lost."""
    admitted, flights = world.stored[1], {f[0] for f in world.stored[2]}
    states = index_of(world)
    lost = [i for i in range(admitted) if not states[i] and i not in flights]
    if lost:
        raise Broken(f"groups {lost} are lost")
    trained = [i for step, _ in world.ledger for i in step]
    if len(trained) != len(set(trained)):
        raise Broken(f"trained twice: {trained}")
    stray = [i for i, state in enumerate(states) if state and i >= admitted]
    if stray:
        raise Broken(f"groups {stray} were never admitted")


def ended(world: World, setting: Setting) -> bool:
    """The run's end: all updates, or a stop that this setting allows, with nothing in flight."""
    if world.done == control.UPDATES_REACHED:
        return len(world.ledger) == setting.updates and not world.stored[2]
    return bool(world.done) and not world.stored[2]


class Explored(NamedTuple):
    states: int
    edges: int
    ends: dict[str, int]
    stuck: list[str]
    """A trace to a state from which no end can be reached; empty if there is none."""


def explore(setting: Setting, limit: int = 2_000_000) -> Explored:
    """Visit every reachable world breadth first; check each, then that each can reach an end.

    Raises:
        Broken: with the shortest trace to the violation.
    """
    gc.disable()  # everything is kept anyway; collecting would take half the time
    try:
        return _explore(setting, limit)
    finally:
        gc.enable()
        _pass.cache_clear()


def _explore(setting: Setting, limit: int) -> Explored:
    first = initial(setting)
    number = {first: 0}
    order, parent, before = [first], [(-1, "start")], [[]]
    edges, at = 0, 0
    while at < len(order):
        here = at
        at += 1
        try:
            check(order[here])
            following = list(moves(order[here], setting))
        except Broken as e:
            raise Broken(f"{e}\n  " + "\n  ".join(_trace(parent, here))) from None
        for label, world in following:
            edges += 1
            there = number.get(world)
            if there is None:
                there = number[world] = len(order)
                order.append(world)
                parent.append((here, label))
                before.append([])
                if there > limit:
                    raise RuntimeError(f"more than {limit} states")
            before[there].append(here)
    goals = [i for i, world in enumerate(order) if ended(world, setting)]
    reached, stack = set(goals), list(goals)
    while stack:
        for i in before[stack.pop()]:
            if i not in reached:
                reached.add(i)
                stack.append(i)
    stuck = next((i for i in range(len(order)) if i not in reached), None)
    ends: dict[str, int] = {}
    for i in goals:
        ends[order[i].done] = ends.get(order[i].done, 0) + 1
    trace = [] if stuck is None else [*_trace(parent, stuck), repr(order[stuck])]
    return Explored(states=len(order), edges=edges, ends=ends, stuck=trace)


def _trace(parent: list[tuple[int, str]], at: int) -> list[str]:
    labels = []
    while at >= 0:
        at, label = parent[at]
        labels.append(label)
    return labels[::-1]


def setting(
    groups: int, lag: int, updates: int, *, every: int = 1, stale: str = "wait", refill: int = 99,
    attempts: int = 2, budget: Budget = SOUND, **more: object,
) -> Setting:  # fmt: skip
    config = AdmissionConfig(
        groups_per_step=groups, max_lag=lag, publish_every=every, on_stale=stale,
        lease_secs=LEASE, max_attempts=attempts, max_refill=refill,
    )  # fmt: skip
    return replace(Setting(config=config, updates=updates, budget=budget), **more)
