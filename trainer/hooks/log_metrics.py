"""One row of metrics and one heartbeat per step. Names are ``trainer/step/<quantity>``."""

from __future__ import annotations

from infra.heartbeats import Heartbeat
from infra.metrics import MetricsWriter
from trainer.loop import StepInfo

PREFIX = "trainer/step/"


class LogMetrics:
    """Last of the hooks, so that it sees every phase's seconds."""

    def __init__(self, metrics: MetricsWriter, heartbeat: Heartbeat) -> None:
        self._metrics, self._heartbeat = metrics, heartbeat

    def after_step(self, info: StepInfo) -> None:
        row = {PREFIX + name: value for name, value in info.metrics.items()}
        row |= {f"{PREFIX}{phase}_secs": secs for phase, secs in info.seconds.items()}
        row[PREFIX + "version"] = info.version
        row[PREFIX + "dropped"] = len(info.entry.dropped)
        row[PREFIX + "violations"] = info.entry.violations
        row[PREFIX + "replayed"] = int(info.replayed)
        self._metrics.emit(row)
        state = "replaying" if info.replayed else "stepping"
        numbers = {name: round(info.metrics[name], 6) for name in ("loss", "reward", "pass_rate")}
        self._heartbeat.beat(state, version=info.version, **numbers)
