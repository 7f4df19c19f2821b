"""A controller that dies, comes back, or meets another one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from infra.contracts.errors import Fenced, StorageError
from infra.contracts.records import Decision
from infra.ledger.audit import audit
from infra.storage import run_layout
from infra.storage.memory_store import MemoryStore
from tests.pipelines.controller.rig import LEASE_SECS, Rig


class DyingStore(MemoryStore):
    """Dies at the n-th write to the control state, before or after it has happened."""

    def __init__(self) -> None:
        super().__init__()
        self.writes_left, self.after = 10**9, False

    def compare_and_swap(self, key: str, data: bytes, expected: str | None) -> str | None:
        if key != run_layout.CONTROL_STATE:
            return super().compare_and_swap(key, data, expected)
        self.writes_left -= 1
        if self.writes_left == 0 and not self.after:
            raise StorageError("killed before the write")
        token = super().compare_and_swap(key, data, expected)
        if self.writes_left == 0:
            raise StorageError("killed after the write")
        return token


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("nth", range(1, 7))
def test_killed_at_every_write_of_its_state(nth: int, after: bool) -> None:
    """Whatever was admitted stays admitted under the same ids; the run ends as if undisturbed."""
    store = DyingStore()
    rig = Rig(store=store)
    rig.publish_version(0)
    store.writes_left, store.after = nth, after
    admitted: dict[int, tuple[str, int]] = {}
    controller, deaths, over = None, 0, False
    for _ in range(60):
        try:
            controller = controller or rig.started()
            over = controller.turn()
        except StorageError:
            controller, deaths = None, deaths + 1
            continue
        if over:
            break
        for task in rig.take():
            word = (task.group_id, task.min_version)
            assert admitted.setdefault(task.admission_index, word) == word
            rig.commit(task, Decision.REJECTED if task.admission_index == 1 else Decision.ACCEPTED)
        rig.train()
    assert over and deaths == 1 and rig.done_word()["reason"] == "updates_reached"
    found = audit(rig.store)
    assert found.holds and found.trained == 6 and found.in_flight == 0 and found.superseded == 0
    assert sorted(admitted) == list(range(found.admitted))


def test_restart_publishes_again_under_the_same_ids_and_attempt() -> None:
    rig = Rig()
    rig.publish_version(0)
    first = rig.started()
    first.turn()
    before = rig.take()
    rig.clock.advance(LEASE_SECS - 1)
    second = rig.started()
    again = rig.take()
    renewed = {"epoch": 2, "expires_at": rig.clock.now() + LEASE_SECS}
    assert again == [replace(task, **renewed) for task in before]
    assert not second.turn() and not rig.take() and second.state.reissued == 0


def test_the_older_controller_is_fenced_also_while_idle() -> None:
    rig = Rig()
    rig.publish_version(0)
    old = rig.started()
    old.turn()
    queue = rig.queue
    rig.started()
    with pytest.raises(Fenced, match="another controller has taken this run over"):
        old.turn()
    rig.publish_version(1)
    with pytest.raises(Fenced):
        old.turn()
    assert len(queue.queued()) == 2  # what it had published before; nothing since
