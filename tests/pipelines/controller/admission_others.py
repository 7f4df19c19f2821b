"""What else can happen in the model: pipelines deliver, lose and commit; the trainer steps."""

from __future__ import annotations

from collections.abc import Iterator

from infra import admission
from tests.pipelines.controller.admission_world import (
    Broken,
    Record,
    Setting,
    World,
    entry,
    flight,
    index_of,
    spend,
    waiting,
    with_record,
)


def pipeline_moves(world: World, setting: Setting, index: int) -> Iterator[tuple[str, World]]:
    gone = world._replace(delivered=world.delivered - {index})
    record, seen = world.records[index], world.seen[index]
    assert seen is not None
    starts = [("", gone)]
    if world.budget.twice:
        starts.append((" (and is delivered again)", world._replace(budget=spend(world, "twice"))))
    for note, start in starts:
        for version in range(seen[0], world.published + 1):
            # A second accepted copy wins if its digest is lower: either may be.
            accepted = start._replace(
                records=with_record(start, index, record._replace(version=version))
            )
            yield f"{index} accepted at version {version}{note}", accepted
            if record.version >= 0:
                yield f"{index} accepted, superseded{note}", start
        if world.budget.bad:
            paid = start._replace(budget=spend(start, "bad"))
            rejected = with_record(start, index, record._replace(rejected=True))
            yield f"{index} rejected{note}", paid._replace(records=rejected)
            if setting.failures:
                failed = with_record(start, index, record._replace(failed=True))
                yield f"{index} failed{note}", paid._replace(records=failed)
    if world.budget.lose:
        yield f"{index} lost with its process", gone._replace(budget=spend(world, "lose"))


def trainer_moves(world: World, setting: Setting) -> Iterator[tuple[str, World]]:
    steps = len(world.ledger)
    for index, _, _ in waiting(world) if world.budget.damage else ():
        gone = world._replace(records=with_record(world, index, Record(failed=True)))
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
