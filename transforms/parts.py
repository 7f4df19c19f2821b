"""What the stages share inside one process: client, recipe, store, metrics, clock.

DoFns are pickled for every bundle of the local streaming runner, so they carry ``StageSettings``
(plain values) and reach everything heavy through ``parts_of``, which builds it once per process.
Reach it only through this module: what a lambda uses is copied by value.
"""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from curation.recipe import Recipe, RecipeConfig, build_recipe
from infra.clock import Clock, SystemClock
from infra.contracts.ids import content_id
from infra.hints import send_hint
from infra.inference.client import InferenceClient
from infra.inference.hedging import HedgeConfig
from infra.inference.open_client import open_client
from infra.metrics import MetricsWriter
from infra.storage.object_store import ObjectStore
from infra.storage.open_store import open_store

HINTED_ROLES = ("trainer", "controller")


@dataclass(frozen=True, kw_only=True)
class StageSettings:
    """Everything the stages need to know, as plain values."""

    store_url: str
    """Where shards are committed."""
    endpoint: str
    """The inference workers, separated by commas (``infra.inference.open_client``)."""
    recipe: RecipeConfig
    role: str
    """Name in metrics and heartbeats, e.g. ``rollouts-0``."""
    incarnation: str
    """Names this process' life in metrics."""
    request_timeout_secs: float = 60.0
    retries: int = 4
    hedge_share: float = 0.0
    hedge_quantile: float = 0.95
    segment_tokens: int = 0
    trainable: bool = False
    """Whether the rollouts are for a trainer: what could not be trained on is refused."""
    client_threads: int = 32
    flush_groups: int = 64
    """Most groups in one shard."""
    key: str = field(init=False, default="")
    """Digest of all the above: under this name the parts of a process are kept."""

    def __post_init__(self) -> None:
        values = json.dumps(dataclasses.asdict(self), sort_keys=True)
        object.__setattr__(self, "key", content_id("stage settings", values))


@dataclass(kw_only=True)
class Parts:
    """Built once per process; safe to use from several bundles at a time."""

    client: InferenceClient
    recipe: Recipe
    store: ObjectStore
    metrics: MetricsWriter
    clock: Clock
    hint: Callable[..., int] = send_hint
    waiting_for: str = "controller"
    """Whom the bundle that runs now waits for; for the heartbeat."""
    stopping: threading.Event = field(default_factory=threading.Event)
    """Set when the process is asked to stop: unfinished groups are left to their leases."""

    def stop(self) -> None:
        """Give up what is in flight, so that the running bundle ends at once."""
        self.stopping.set()
        self.client.close()


_parts: dict[str, Parts] = {}
_lock = threading.Lock()


def parts_of(settings: StageSettings) -> Parts:
    """Return the parts of this process, building them at first use."""
    found = _parts.get(settings.key)
    if found is None:
        with _lock:
            found = _parts.get(settings.key)
            if found is None:
                found = _parts[settings.key] = build_parts(settings)
    return found


def install_parts(settings: StageSettings, parts: Parts) -> None:
    """Use these parts for ``settings`` in this process (an entry point's or a test's choice)."""
    with _lock:
        _parts[settings.key] = parts


def build_parts(settings: StageSettings) -> Parts:
    """Open what the settings name. Raises ``ConfigError`` where something cannot be."""
    store, clock = open_store(settings.store_url), SystemClock()
    quantile, share = settings.hedge_quantile, settings.hedge_share
    return Parts(
        client=open_client(
            settings.endpoint,
            threads=settings.client_threads,
            retries=settings.retries,
            trainable=settings.trainable,
            hedge=HedgeConfig(quantile=quantile, share=share) if share else None,
            segment_tokens=settings.segment_tokens,
        ),
        recipe=build_recipe(settings.recipe),
        store=store,
        metrics=MetricsWriter(store, settings.role, settings.incarnation, clock),
        clock=clock,
    )
