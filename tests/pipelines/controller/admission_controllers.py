"""What the controllers of the model can do: read, decide, persist, publish, crash, be fenced."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from pipelines.controller import state as control
from tests.pipelines.controller.admission_world import (
    LEASE,
    RUN,
    SOURCE,
    Broken,
    Budget,
    Controller,
    Record,
    Setting,
    World,
    entry,
    group,
    index_of,
    pack,
    spend,
    unpack,
    waiting,
)


def start_controller(world: World) -> tuple[str, World]:
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


def controller_moves(world: World, setting: Setting, k: int) -> Iterator[tuple[str, World]]:
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
    plan = decide(setting, me.memory, *looked, world.published, dead, queued)
    return plan and me._replace(phase="planned", looked=None, **plan)


def _look(world: World, me: Controller) -> tuple:
    states = index_of(world)
    ended = tuple(states[f[0]] if f[0] < len(states) else "" for f in me.memory[2])
    return ended, waiting(world), len(world.ledger)


@cache
def decide(
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


def _become(world: World, k: int, new: Controller | None) -> World:
    """Controller ``k`` changes, or is gone."""
    rest = world.controllers[:k] + ((new,) if new else ()) + world.controllers[k + 1 :]
    return world._replace(controllers=rest)
