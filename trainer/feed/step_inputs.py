"""Inputs of the loop: steps of the ledger that a restarted trainer lacks, then live ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from infra.clock import Clock
from infra.contracts.errors import ConfigError, Fenced
from infra.contracts.manifests import LedgerEntry
from infra.ledger import ledger
from infra.storage.object_store import ObjectStore
from trainer.feed.shard_feed import ShardFeed
from trainer.incarnation import Incarnation
from trainer.loop import StepInput
from trainer.stopping import Stopping


def replayed_steps(
    entries: Iterable[LedgerEntry], feed: ShardFeed, settings_digest: str
) -> Iterator[StepInput]:
    """Repeat what the ledger says, in order, with the exact copies it names.

    Raises:
        ConfigError: the steps were made with other settings, so repeating them gives other weights.
        StorageError: a shard that a step was made of is gone.
    """
    for entry in entries:
        if entry.settings_digest != settings_digest:
            raise ConfigError(
                f"ledger step {entry.step} was made with other objective, optimizer or training "
                "settings; restore run.toml, or branch a new run from a version of this one"
            )
        started = time.perf_counter()
        groups = feed.read(entry.groups)
        yield StepInput(
            entry=entry,
            groups=groups,
            replayed=True,
            seconds={"wait": 0.0, "read": time.perf_counter() - started, "ledger": 0.0},
        )


@dataclass(frozen=True, kw_only=True)
class LiveSteps:
    """Takes groups as they are committed and claims a ledger step for them."""

    store: ObjectStore
    feed: ShardFeed
    incarnation: Incarnation
    stopping: Stopping
    settings_digest: str
    clock: Clock
    timer: Callable[[], float] = time.perf_counter

    def after(self, version: int) -> Iterator[StepInput]:
        """Steps ``version + 1``, ...; ends when the trainer is to stop.

        Raises:
            Fenced: another trainer claimed a step, or took over the run.
        """
        while not self.stopping.before_step(version):
            started = self.timer()
            found = self.feed.next(version, lambda waiting, v=version: self._over(v, waiting))
            if found is None:
                return
            waited = self.timer()
            self.incarnation.check()
            entry = LedgerEntry(
                step=version + 1,
                groups=tuple(
                    (group.group_id, digest)
                    for group, digest in zip(found.groups, found.digests, strict=True)
                ),
                dropped=found.choice.dropped,
                lag_max=found.choice.lag_max,
                violations=found.choice.violations,
                incarnation=self.incarnation.name,
                settings_digest=self.settings_digest,
                created_at=self.clock.now(),
            )
            if not ledger.append(self.store, entry):
                raise Fenced(
                    f"step {entry.step} of {self.store.url} is claimed by another trainer; "
                    "this one stops, let the other one go on"
                )
            seconds = {
                "wait": waited - started - found.read_secs,
                "read": found.read_secs,
                "ledger": self.timer() - waited,
            }
            yield StepInput(entry=entry, groups=found.groups, replayed=False, seconds=seconds)
            version = entry.step

    def _over(self, version: int, waiting: int) -> bool:
        """Asked while the feed waits; a replaced trainer would otherwise wait for ever."""
        self.incarnation.check()
        return self.stopping.while_waiting(version, waiting)
