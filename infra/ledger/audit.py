"""The audit: every admitted group is in exactly one place, none was trained twice.

``admitted = trained + rejected + failed + dropped + waiting + in_flight + lost``, where always
``lost = twice = 0``, and ``in_flight = 0`` after a clean finish.
"""

from __future__ import annotations

from dataclasses import dataclass

from infra.contracts.json_codec import from_json
from infra.contracts.manifests import ControlState
from infra.ledger.group_index import GroupIndex, GroupState
from infra.storage import run_layout
from infra.storage.object_store import ObjectStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """What became of every admitted group, and what is wrong if anything is."""

    admitted: int
    trained: int
    rejected: int
    failed: int
    dropped: int
    waiting: int
    in_flight: int
    lost: int
    """Admitted, without a record, and not known to be in flight."""
    twice: int
    """Groups that more than one step consumed."""
    superseded: int
    """Committed copies that do not count."""
    reissued: int
    """Messages published again because a lease expired."""
    max_lag_seen: int
    lost_indices: tuple[int, ...] = ()
    """Admission indices of the lost groups."""
    twice_groups: tuple[str, ...] = ()
    unplaced_groups: tuple[str, ...] = ()
    """Groups that have a state without having been admitted, or without a committed copy."""

    @property
    def accounted(self) -> int:
        """The right side of the identity."""
        ended = self.trained + self.rejected + self.failed + self.dropped
        return ended + self.waiting + self.in_flight + self.lost

    @property
    def holds(self) -> bool:
        """True for a sound run."""
        return self.admitted == self.accounted and not (
            self.lost or self.twice or self.unplaced_groups
        )

    def numbers(self) -> dict[str, int]:
        """The counts by name, as in ``summary.json``."""
        return {
            name: value
            for name in self.__dataclass_fields__
            if isinstance(value := getattr(self, name), int)
        }


def audit(store: ObjectStore) -> Audit:
    """Account for every admitted group of a run, also while it is running.

    Raises:
        StorageError: something cannot be read.
    """
    # The state first: a group that ends while we read has its record by then, one that is admitted
    # meanwhile is not in this state and is left out.
    state = _control_state(store)
    index = GroupIndex(store)
    index.refresh()

    counts = dict.fromkeys(GroupState, 0)
    placed: set[int] = set()
    unplaced, later = [], []
    for group_id, group_state in sorted(index.states().items()):
        copies = index.copies_of(group_id)
        admission_index = copies[0].entry.admission_index if copies else None
        if admission_index is None or admission_index in placed:
            unplaced.append(group_id)
        elif admission_index >= state.next_index:
            later.append((admission_index, group_id))
        else:
            placed.add(admission_index)
            counts[group_state] += 1
    if later:  # admitted while we read, or never
        now_admitted = _control_state(store).next_index
        unplaced += [group_id for number, group_id in later if number >= now_admitted]
    flying = {flight.admission_index for flight in state.flights} - placed
    lost = sorted(set(range(state.next_index)) - placed - flying)
    twice = sorted(gid for gid in index.states() if len(index.steps_of(gid)) > 1)
    return Audit(
        admitted=state.next_index,
        trained=counts[GroupState.TRAINED],
        rejected=counts[GroupState.REJECTED],
        failed=counts[GroupState.FAILED],
        dropped=counts[GroupState.DROPPED],
        waiting=counts[GroupState.WAITING],
        in_flight=len(flying),
        lost=len(lost),
        twice=len(twice),
        superseded=index.superseded,
        reissued=state.reissued,
        max_lag_seen=max((entry.lag_max for entry in index.entries), default=0),
        lost_indices=tuple(lost),
        twice_groups=tuple(twice),
        unplaced_groups=tuple(sorted(unplaced)),
    )


def _control_state(store: ObjectStore) -> ControlState:
    found = store.read_with_token(run_layout.CONTROL_STATE)
    if found is None:  # nothing was admitted yet
        return ControlState(run="", epoch=0)
    return from_json(ControlState, found[0], name=f"{store.url}/{run_layout.CONTROL_STATE}")
