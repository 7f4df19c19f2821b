"""The queue behind the embedded broker: one queue, any number of subscriptions that share it.

A message is taken once, by whoever pulls first, and is gone then (at most once): the controller's
leases are what brings lost work back. The queue remembers which subscription took a group, so that
the leases of a dead process can end at once.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from infra.contracts.records import GroupTask


class Publisher(Protocol):
    """Where the controller sends admitted groups (the embedded queue, or a Pub/Sub topic)."""

    def publish(self, tasks: tuple[GroupTask, ...]) -> None:
        """Send one message; may be delivered late, twice or never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedMessage:
    """One message: tasks that one pipeline process takes together."""

    number: int
    tasks: tuple[GroupTask, ...]


class MessageQueue:
    """Thread-safe; the controller publishes, the broker's threads pull."""

    def __init__(self) -> None:
        self._messages: deque[QueuedMessage] = deque()
        self._taken: dict[str, str] = {}
        self._changed = threading.Condition()
        self._number = 0

    def publish(self, tasks: tuple[GroupTask, ...]) -> None:
        """Append one message and wake a waiting pull."""
        with self._changed:
            self._number += 1
            self._messages.append(QueuedMessage(number=self._number, tasks=tasks))
            for task in tasks:
                self._taken.pop(task.group_id, None)
            self._changed.notify()

    def pull(self, subscription: str, now: float, timeout_secs: float) -> QueuedMessage | None:
        """Take the oldest message, without tasks that expired before ``now`` (Unix seconds).

        Waits up to ``timeout_secs`` while the queue is empty; None then.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._messages, timeout=timeout_secs)
            while self._messages:
                message = self._messages.popleft()
                fresh = tuple(t for t in message.tasks if t.expires_at > now)
                if fresh:
                    self._taken.update({t.group_id: subscription for t in fresh})
                    return QueuedMessage(number=message.number, tasks=fresh)
            return None

    def queued(self) -> frozenset[str]:
        """Groups that nobody has taken yet."""
        with self._changed:
            return frozenset(t.group_id for m in self._messages for t in m.tasks)

    def taken_by(self, subscription: str) -> frozenset[str]:
        """Groups whose newest message this subscription took."""
        with self._changed:
            return frozenset(g for g, taker in self._taken.items() if taker == subscription)

    def keep_only(self, group_ids: Iterable[str]) -> None:
        """Forget who took groups that are not in flight any more."""
        alive = frozenset(group_ids)
        with self._changed:
            self._taken = {g: taker for g, taker in self._taken.items() if g in alive}
