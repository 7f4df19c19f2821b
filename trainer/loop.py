"""The loop, as a generator. What happens around a step is done by hooks (``trainer.hooks``).

Order of step N, which restarts rely on:

1. the inputs claim ``ledger/step-N`` (create-if-absent, before the gradient);
2. ``Learner.learn``: state N-1 becomes state N;
3. hooks, in this order: checkpoint (when due), publish version N, metrics.

Inputs come from ``step_inputs``: first the ledger's steps that the state lacks, then live ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from infra.clock import Clock
from infra.contracts.manifests import LedgerEntry
from infra.contracts.records import Group
from trainer.learner import Learner
from trainer.state import TrainState


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepInput:
    """A step whose ledger entry is written."""

    entry: LedgerEntry
    groups: tuple[Group, ...]
    replayed: bool
    """Read back from the ledger after a restart."""
    seconds: dict[str, float]
    """By phase: wait, read, ledger."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepInfo:
    """A step that has been computed. Hooks may add to ``seconds`` and ``metrics``."""

    entry: LedgerEntry
    state: TrainState
    """Version ``entry.step``; the next step uses its buffers up, so keep no reference."""
    replayed: bool
    metrics: dict[str, float]
    seconds: dict[str, float]
    updated_at: float
    """Unix seconds at which the state was there: from here sync time counts."""

    @property
    def version(self) -> int:
        return self.entry.step


def run_steps(
    state: TrainState, inputs: Iterable[StepInput], learner: Learner, clock: Clock
) -> Iterator[StepInfo]:
    """Learn from each input in turn. The consumer runs the hooks before it asks for the next."""
    for item in inputs:
        state, learned = learner.learn(state, item.groups, item.entry.step)
        yield StepInfo(
            entry=item.entry,
            state=state,
            replayed=item.replayed,
            metrics=learned.metrics,
            seconds=item.seconds | learned.seconds,
            updated_at=clock.now(),
        )
