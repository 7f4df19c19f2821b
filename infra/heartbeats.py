"""Heartbeats: one small file per role that says what it does and whom it waits for.

Example ``control/heartbeats/trainer.json``::

    {"at": 1700000000.5, "idle_share": 0.25, "pid": 42, "role": "trainer", "since": 1699999999.0,
     "state": "waiting", "version": 12, "waiting_for": "rollouts"}
"""

from __future__ import annotations

import json
import os
from typing import Any

from infra.clock import Clock
from infra.contracts.errors import DamagedObject
from infra.storage import run_layout
from infra.storage.object_store import ObjectStore, Token

RESERVED = frozenset({"role", "state", "waiting_for", "since", "at", "pid"})
_LAST_WORDS = frozenset({"stopped", "failed", "finished"})
BUCKET_SECS = 2.0
"""A bucket takes one write per second and object; what comes sooner waits for the next beat."""
_FOLDER = run_layout.heartbeat("").removesuffix(".json")


class Heartbeat:
    """Writes the heartbeat of one role.

    Args:
        store: where the run lies.
        role: e.g. ``trainer``, ``rollouts-0``; one process at a time writes it.
        clock: stamps the beats.
        every_secs: beats that say the same are written at most this often, because each costs two
            syncs of the disk; a new state or a new ``waiting_for`` is written at once, in a bucket
            every ``BUCKET_SECS``.
    """

    def __init__(
        self, store: ObjectStore, role: str, clock: Clock, *, every_secs: float = 1.0
    ) -> None:
        self._store, self._role, self._clock = store, role, clock
        self._every_secs = every_secs
        self._least_secs = BUCKET_SECS if store.url.startswith("gs://") else 0.0
        self._token: Token | None = None
        self._written_at: float | None = None
        self._beaten_at = self._started_at = self._since = clock.now()
        self._idle_secs = 0.0
        self._doing = ("", "")
        self._unsaid = False

    def beat(self, state: str, waiting_for: str = "", **numbers: Any) -> None:
        """Say what this role does from now on, until the next beat.

        Args:
            state: a word, e.g. ``stepping``.
            waiting_for: who or what it waits for; empty while it works. The share of time spent
                waiting is kept and written as ``idle_share`` unless ``numbers`` has its own.
            **numbers: further plain values.
        """
        taken = RESERVED & numbers.keys()
        if taken:
            raise ValueError(f"{min(taken)} is written by itself; use another name")
        now = self._clock.now()
        if self._doing[1]:
            self._idle_secs += max(now - self._beaten_at, 0.0)
        self._beaten_at = now
        changed = self._doing != (state, waiting_for)
        if changed:
            self._doing, self._since = (state, waiting_for), now
        if not self._is_due(now, changed or self._unsaid, state):
            self._unsaid = changed or self._unsaid
            return
        alive_secs = now - self._started_at
        share = self._idle_secs / alive_secs if alive_secs > 0 else 0.0
        beat = {
            "idle_share": round(min(share, 1.0), 4),
            **numbers,
            "role": self._role,
            "state": state,
            "waiting_for": waiting_for,
            "since": self._since,
            "at": now,
            "pid": os.getpid(),
        }
        self._write(json.dumps(beat, sort_keys=True).encode())
        self._written_at, self._unsaid = now, False

    def _is_due(self, now: float, news: bool, state: str) -> bool:
        if self._written_at is None or state in _LAST_WORDS:
            return True
        since = now - self._written_at
        return since >= max(0.0 if news else self._every_secs, self._least_secs) or since < 0

    def _write(self, data: bytes) -> None:
        """Replace whatever is there: the newest beat wins, also over a dead process' last one."""
        key = run_layout.heartbeat(self._role)
        while True:
            token = self._store.compare_and_swap(key, data, self._token)
            if token is not None:
                self._token = token
                return
            found = self._store.read_with_token(key)
            self._token = found and found[1]


def read_heartbeats(store: ObjectStore) -> dict[str, dict[str, Any]]:
    """Return the last beat of every role: ``state``, ``waiting_for``, ``since``, ``at``, ...

    Raises:
        DamagedObject: a heartbeat is not JSON.
    """
    beats: dict[str, dict[str, Any]] = {}
    for key in store.list_after(_FOLDER):
        found = store.read_with_token(key)
        if found is None:
            continue
        try:
            beat = json.loads(found[0])
            beats[beat["role"]] = beat
        except (ValueError, TypeError, KeyError) as e:
            raise DamagedObject(f"{store.url}/{key}: not a heartbeat: {e}; delete it") from e
    return beats
