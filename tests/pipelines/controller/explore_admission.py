"""Visit every reachable world, check each, and that each can reach the run's end."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import NamedTuple

from pipelines.controller import state as control
from tests.pipelines.controller.admission_controllers import (
    controller_moves,
    decide,
    start_controller,
)
from tests.pipelines.controller.admission_others import pipeline_moves, trainer_moves
from tests.pipelines.controller.admission_world import Broken, Setting, World, index_of, initial


def moves(world: World, setting: Setting) -> Iterator[tuple[str, World]]:
    """Everything that can happen next, with a name for the trace."""
    if not world.done:
        for k in range(len(world.controllers)):
            yield from controller_moves(world, setting, k)
        if not world.controllers or (world.budget.takeover and len(world.controllers) == 1):
            yield start_controller(world)
    for index in world.delivered:
        yield from pipeline_moves(world, setting, index)
    yield from trainer_moves(world, setting)


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
        decide.cache_clear()


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
