"""From the prompt order to group tasks: which prompt is next, and what its message says."""

from __future__ import annotations

from collections.abc import Mapping

from infra.contracts import ids
from infra.contracts.errors import ConfigError
from infra.contracts.manifests import Flight
from infra.contracts.records import GroupTask, SamplingParams
from infra.prompts.order import PromptOrder
from infra.prompts.prompt_set import PromptSet


class PromptSource:
    """The training prompts in their order; evaluation prompt ids are denied.

    Args:
        denied: prompt ids never admitted, besides the set's own held-out ones.
    """

    def __init__(
        self, prompts: PromptSet, order: PromptOrder, denied: frozenset[str] = frozenset()
    ) -> None:
        self._prompts, self._order = prompts, order
        self._denied = denied | prompts.held_out_ids
        self.name = prompts.name
        self.size = len(prompts.train)
        self.digest = prompts.digest

    def draw(self, cursor: int, retired: Mapping[str, int]) -> tuple[int, str] | None:
        """Return (position, prompt id) of the first admissible prompt at ``cursor`` or after it.

        None when the last epoch is over or no prompt is admissible at all. Two epochs' length is
        looked through, because a prompt may stand first in one and last in the next.
        """
        for position in range(cursor, cursor + 2 * len(self._prompts.train)):
            index = self._order.at(position)
            if index is None:
                return None
            prompt_id = self._prompts.train_ids[index]
            if prompt_id not in self._denied and prompt_id not in retired:
                return position, prompt_id
        return None

    def task(
        self, flight: Flight, *, run: str, epoch: int, run_seed: int, sampling: SamplingParams
    ) -> GroupTask:
        """Build the message about one flight; any attempt says the same but for its expiry.

        Raises:
            ConfigError: another prompt stands at the flight's position than when it was admitted.
        """
        index = self._order.at(flight.position)
        prompt_id = "" if index is None else self._prompts.train_ids[index]
        if index is None or ids.group_id(run, prompt_id, flight.admission_index) != flight.group_id:
            raise ConfigError(
                f"prompt set {self.name}: position {flight.position} is not the prompt that was "
                f"admitted as group {flight.admission_index}; restore the prompts of this run"
            )
        prompt = self._prompts.train[index]
        return GroupTask(
            run=run,
            group_id=flight.group_id,
            admission_index=flight.admission_index,
            prompt_id=prompt_id,
            prompt_revision=ids.prompt_revision(prompt),
            prompt=prompt,
            sampling=sampling,
            seed=ids.group_seed(run_seed, flight.group_id),
            min_version=flight.min_version,
            attempt=flight.attempt,
            epoch=epoch,
            expires_at=flight.leased_until,
        )
