"""What outlives the launcher itself: wall time so far, evaluations, why it stopped."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from infra.contracts.json_codec import from_json, to_marker
from infra.storage import run_layout
from infra.storage.object_store import ObjectStore


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Result of ``headrace evaluate`` for one version, as far as the launcher needs it."""

    version: int
    problems: int
    passes: int
    """Problems whose greedy answer passed."""
    pass_rate: float
    interval: tuple[float, float]
    """95 % Wilson interval of ``pass_rate``."""
    pass_at_k: dict[str, float] = field(default_factory=dict)
    """k -> unbiased pass@k over sampled answers; empty when none were sampled."""


@dataclass(frozen=True, kw_only=True)
class LauncherState:
    """``control/launcher.json``, rewritten at each new version and at every end."""

    wall_secs: float = 0.0
    """All sessions together, from command to end."""
    sessions: int = 0
    before: Evaluation | None = None
    after: Evaluation | None = None
    stop_reason: str = ""
    """Why the last session ended; empty while one runs or after it was killed."""


def read_evaluation(text: str) -> Evaluation:
    """Take what the launcher needs from the last line that ``headrace evaluate --json`` printed."""
    found = json.loads(text.strip().splitlines()[-1])
    return Evaluation(
        version=found["version"],
        problems=found["problems"],
        passes=found["passes"],
        pass_rate=found["pass_rate"],
        interval=(found["interval"][0], found["interval"][1]),
        pass_at_k={str(k): float(rate) for k, rate in found.get("pass_at_k", {}).items()},
    )


def load_state(store: ObjectStore) -> LauncherState:
    """Return the stored state, a fresh one for a new run."""
    found = store.read_with_token(run_layout.LAUNCHER_STATE)
    return LauncherState() if found is None else from_json(LauncherState, found[0])


def save_state(store: ObjectStore, state: LauncherState) -> None:
    """Replace the stored state; the launcher's lock makes it the only writer."""
    replace_object(store, run_layout.LAUNCHER_STATE, to_marker(state))


def replace_object(store: ObjectStore, key: str, data: bytes) -> None:
    """Write an object whatever was there before, whole or not at all."""
    while True:
        found = store.read_with_token(key)
        if store.compare_and_swap(key, data, found[1] if found else None) is not None:
            return
