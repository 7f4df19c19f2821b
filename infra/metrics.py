"""Metrics of a run: rows of named values, one object per flush, read incrementally.

``metrics/<role>/<incarnation>-<sequence>.json`` is a JSON list of rows, e.g.::

    [{"at": 1700000000.5, "trainer/step/loss": 0.25, "trainer/step/secs":
      {"count": 4, "max": 1.5, "min": 0.5, "sum": 4.0}}]

Names are ``room/stage/quantity_unit``. What many events make up is a ``Tally``: tallies of parts
merge into the tally of the whole, which means of means do not.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from infra.clock import Clock
from infra.contracts.errors import DamagedObject
from infra.storage import run_layout
from infra.storage.object_store import ObjectStore

FLUSH_SECS = 2.0
_FLUSH_ROWS = 1000
_ALL = 1 << 60
_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""JSON has no such numbers; they are written as words, so that any reader can open the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Sum, count, minimum and maximum of some values; with ``merge`` a commutative monoid."""

    sum: float = 0.0
    count: int = 0
    min: float = math.inf
    max: float = -math.inf

    @classmethod
    def of(cls, values: Iterable[float]) -> Tally:
        """Tally of values.

        >>> Tally.of([1.0, 3.0]).mean
        2.0
        """
        items = [float(value) for value in values]
        if not items:
            return cls()
        return cls(sum=math.fsum(items), count=len(items), min=min(items), max=max(items))

    def merge(self, other: Tally) -> Tally:
        """Tally of both sets of values together."""
        return Tally(
            sum=self.sum + other.sum,
            count=self.count + other.count,
            min=min(self.min, other.min),
            max=max(self.max, other.max),
        )

    @property
    def mean(self) -> float:
        """NaN when nothing was counted."""
        return self.sum / self.count if self.count else math.nan


class MetricsWriter:
    """Collects rows of one process and writes them as segments; safe from several threads.

    Args:
        store: where the run lies.
        role: e.g. ``trainer``; may have several writers, one per incarnation.
        incarnation: names this process' life, so that no two write the same segment.
        clock: stamps the rows.
        flush_secs: ``emit`` and ``observe`` write a segment when the last is so old.
    """

    def __init__(
        self,
        store: ObjectStore,
        role: str,
        incarnation: str,
        clock: Clock,
        *,
        flush_secs: float = FLUSH_SECS,
    ) -> None:
        self._store, self._role, self._incarnation = store, role, incarnation
        self._clock, self._flush_secs = clock, flush_secs
        self._lock = threading.RLock()
        self._rows: list[dict[str, Any]] = []
        self._tallies: dict[str, Tally] = {}
        self._sequence = 0
        self._flushed_at = clock.now()

    def emit(self, values: Mapping[str, Any] | None = None, /, **named: Any) -> None:
        """Add one row of plain values, ``Tally`` objects or small dicts of numbers.

        Names with slashes do not fit keyword arguments; give them as a mapping.
        """
        row = {name: _plain(value) for name, value in {**(values or {}), **named}.items()}
        with self._lock:
            self._rows.append({"at": self._clock.now(), **row})
            self._flush_if_due()

    def observe(self, values: Mapping[str, float] | None = None, /, **named: float) -> None:
        """Count one event into the tallies that the next flush writes as one row."""
        with self._lock:
            for name, value in {**(values or {}), **named}.items():
                old = self._tallies.get(name, Tally())
                self._tallies[name] = old.merge(Tally.of([value]))
            self._flush_if_due()

    def flush(self) -> None:
        """Write what has been collected as one object; nothing if there is nothing."""
        with self._lock:
            self._flushed_at = self._clock.now()
            rows = list(self._rows)
            if self._tallies:
                tallies = {name: _plain(tally) for name, tally in self._tallies.items()}
                rows.append({"at": self._flushed_at, **tallies})
            if not rows:
                return
            data = json.dumps(rows, sort_keys=True, separators=(",", ":"), allow_nan=False)
            while not self._store.create(self._key(), data.encode()):
                self._sequence += 1  # an earlier life under the same incarnation
            self._sequence += 1
            self._rows.clear()
            self._tallies.clear()

    def _key(self) -> str:
        return run_layout.metrics_part(self._role, self._incarnation, self._sequence)

    def _flush_if_due(self) -> None:
        waited = self._clock.now() - self._flushed_at
        if waited >= self._flush_secs or len(self._rows) >= _FLUSH_ROWS:
            self.flush()


class MetricsReader:
    """Reads the rows of one role, each once, from all its incarnations."""

    def __init__(self, store: ObjectStore, role: str) -> None:
        self._store = store
        self._prefix = f"metrics/{role}/"
        self._read: dict[str, str] = {}

    def poll(self) -> list[dict[str, Any]]:
        """Return the rows that are new since the last poll, oldest first.

        Raises:
            DamagedObject: a segment is not what a writer writes.
        """
        rows: list[dict[str, Any]] = []
        read = dict(self._read)
        for key in self._store.list_after(self._prefix, limit=_ALL):
            incarnation = key.rpartition("-")[0]
            if key > read.get(incarnation, ""):
                rows += self._segment(key)
                read[incarnation] = key
        self._read = read  # only now: what comes before a damaged segment is not lost
        return sorted(rows, key=lambda row: row["at"])

    def _segment(self, key: str) -> list[dict[str, Any]]:
        try:
            rows = json.loads(self._store.read(key))
            return [{name: _number(value) for name, value in row.items()} for row in rows]
        except (ValueError, TypeError, AttributeError) as e:
            raise DamagedObject(f"{self._store.url}/{key}: not a segment of metrics: {e}") from e


def as_tally(value: Any) -> Tally:
    """The ``Tally`` in a row read back; a plain number counts once."""
    return Tally(**value) if isinstance(value, Mapping) else Tally.of([value])


def _plain(value: Any) -> Any:
    """What JSON can hold: numpy and JAX scalars become numbers, odd floats words."""
    if isinstance(value, Tally):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if value is None or isinstance(value, bool | str | int):
        return value
    if hasattr(value, "item"):
        return _plain(value.item())
    if not isinstance(value, float):
        raise TypeError(f"{value!r} is no metric; give a number, text, a Tally or a dict of these")
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _number(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _number(item) for name, item in value.items()}
    return _WORDS.get(value, value) if isinstance(value, str) else value
