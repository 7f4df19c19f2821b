"""One optimizer call of a step: its sequences, and the batch they are packed into."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import numpy as np

from trainer.batch import Batch
from trainer.credit import TrainingSequence
from trainer.packing import gather, scatter
from trainer.policy_credit import TokenValues


@dataclass(slots=True)
class OptimizerCall:
    """Between numbers by group, sequence and token (on the host), and arrays of the batch."""

    groups: list[list[TrainingSequence]]
    batch: Batch
    values: jax.Array | None = field(default=None)
    """float32[K,M]: the critic's, before the step."""
    returns: np.ndarray | None = field(default=None)
    """float32[K,M]: what the critic learns."""

    def named(self, name: str) -> TokenValues:
        """A field of the batch by group, sequence and token."""
        return self.scattered(getattr(self.batch, name))

    def scattered(self, values: jax.Array) -> TokenValues:
        """NaN where nothing is trained."""
        flat = iter(scatter(self.batch, np.asarray(values), self._sequences()))
        return [[next(flat) for _ in group] for group in self.groups]

    def gathered(self, values: TokenValues) -> np.ndarray:
        """The opposite, float32[K,M]."""
        return gather(self.batch, [v for group in values for v in group])

    def credit(self, advantages: TokenValues) -> None:
        """Put these advantages into the batch."""
        self.batch = self.batch.replace(advantages=self.gathered(advantages))

    def _sequences(self) -> list[TrainingSequence]:
        return [s for group in self.groups for s in group]
