"""The trainer put together, and the order in which it starts and ends (DESIGN section 7).

Start: claim the incarnation; restore checkpoint C, or build version 0; publish it if LATEST is
behind; replay the ledger's steps C+1..L without publishing anything at or below LATEST; go live.
End: publish the last version, save it, wait until it is durable.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from infra.clock import Clock
from infra.contracts.errors import ConfigError
from infra.heartbeats import Heartbeat, read_heartbeats
from infra.hints import send_hint
from infra.ledger import ledger
from infra.metrics import MetricsWriter
from infra.storage import run_layout
from infra.storage.folder_copy import download_folder
from infra.storage.object_store import ObjectStore
from infra.text.tokenizer import load_tokenizer
from infra.weights.delta import DeltaPolicy
from infra.weights.open_reader import open_push
from infra.weights.stored_weights import StoredWeights
from trainer.checkpoint import Progress
from trainer.checkpoint_copies import AnyCheckpoints, open_checkpoints
from trainer.compile_cache import enable_compile_cache
from trainer.config import TrainerConfig
from trainer.feed.shard_feed import ShardFeed, Wakeups
from trainer.feed.step_inputs import LiveSteps, replayed_steps
from trainer.hooks.hook import Hook
from trainer.hooks.log_metrics import LogMetrics
from trainer.hooks.publish_weights import PublishWeights, RetireVersions
from trainer.hooks.save_checkpoint import SaveCheckpoint
from trainer.incarnation import Incarnation
from trainer.learner import Learner
from trainer.loop import StepInput, run_steps
from trainer.model.pretrained import (
    MARKER,
    cache_folder,
    load_config,
    load_model,
    resolve_model,
)
from trainer.model.transformer import Params
from trainer.state import TrainState
from trainer.stopping import Stopping

ROLE = "trainer"


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """One trainer process's life. Everything it touches is handed in."""

    store: ObjectStore
    config: TrainerConfig
    stopping: Stopping
    wakeups: Wakeups
    clock: Clock
    name: str
    """Of this incarnation; unique."""
    environ: Mapping[str, str]
    scratch: Path
    """Of this run, on this machine: what a run in a bucket needs as files."""

    def train(self) -> int:
        """Train until the run is over or interrupted; return the last version.

        Raises:
            Fenced: another trainer took over.
            HeadraceError: anything else that ends the run, in one line.
        """
        kept = self.config.own.checkpoint
        heartbeat = Heartbeat(self.store, ROLE, self.clock)
        heartbeat.beat("starting", "the model")
        incarnation = Incarnation(self.store, self.name)
        enable_compile_cache(cache_folder(self.environ))
        folder = self._model_folder()
        learner = Learner(load_config(folder), self.config, reference=self._reference(folder))
        metrics = MetricsWriter(self.store, ROLE, self.name, self.clock)
        checkpoints = open_checkpoints(
            self.store, kept.keep_checkpoints, self.scratch / run_layout.CHECKPOINTS
        )
        try:
            state, progress = self._restore(checkpoints, learner, folder)
            weights = self._weights()
            publish = self._publisher(weights, incarnation, learner, folder, progress)
            save = SaveCheckpoint(checkpoints, kept, progress, self.clock, lambda: publish.diverged)
            retire = RetireVersions(
                self.store,
                weights,
                kept.keep_versions,
                checkpoints.durable,
                self._leased,
                self.clock,
            )
            hooks: tuple[Hook, ...] = (save, publish, retire, LogMetrics(metrics, heartbeat))
            publish.ensure(progress.version, state)
            inputs = self._inputs(progress.version, incarnation, heartbeat)
            for info in run_steps(state, inputs, learner, self.clock):
                state = info.state
                for hook in hooks:
                    hook.after_step(info)
            publish.ensure(save.progress.version, state)
            save.save(state)
            heartbeat.beat("stopped", version=save.progress.version)
            return save.progress.version
        finally:
            metrics.flush()
            checkpoints.close()

    def _model_folder(self) -> Path:
        """Version 0's folder: what the warm start or ``headrace branch`` made, else the source.

        Raises:
            ConfigError: the model is missing, or a warm start is configured and was not made.
        """
        made = self.scratch / run_layout.INIT_MODEL
        if download_folder(self.store, run_layout.INIT_MODEL, made):  # a run in a bucket
            return made
        if self.store.read_with_token(run_layout.INIT_DONE) or (made / MARKER).is_file():
            return made
        if self.config.own.warm_start.target:
            raise ConfigError(
                f"{self.store.url}: [warm_start] target is set and {made} is not there; "
                f"run: headrace sft {self.store.url} --out {made}"
            )
        return resolve_model(self.config.own.model, cache_folder(self.environ))

    def _reference(self, folder: Path) -> Params | None:
        """pi_ref, where the objective has one: version 0, or the folder that is named.

        Raises:
            ConfigError: its tokens or shapes are others, so its log-probs would mean nothing.
        """
        objective = self.config.own.objective
        if not objective.needs_reference:
            return None
        other = Path(objective.reference) if objective.reference else folder
        model, params = load_model(other, self.config.shared.run.seed)
        if load_tokenizer(other).digest != load_tokenizer(folder).digest:
            raise ConfigError(
                f"objective.reference = {other}: its tokenizer is not that of {folder}; "
                "give a model with the same tokens"
            )
        if model != load_config(folder):
            raise ConfigError(
                f"objective.reference = {other}: its shape is not that of {folder}; "
                "a reference of another shape is not supported"
            )
        return params

    def _restore(
        self, checkpoints: AnyCheckpoints, learner: Learner, folder: Path
    ) -> tuple[TrainState, Progress]:
        """The newest checkpoint, else version 0."""
        found = checkpoints.restore(learner.state_shapes())
        if found is not None:
            return found
        _, params = load_model(folder, self.config.shared.run.seed)
        return learner.new_state(params), Progress()

    def _publisher(
        self,
        weights: StoredWeights,
        incarnation: Incarnation,
        learner: Learner,
        folder: Path,
        progress: Progress,
    ) -> PublishWeights:
        served = self.config.own.weights
        return PublishWeights(
            self.store,
            weights,
            incarnation,
            learner.model,
            tokenizer_digest=load_tokenizer(folder).digest,
            dtype=self.config.own.training.publish_dtype,
            every=self.config.shared.admission.publish_every,
            announce=announce,
            diverged=progress.diverged,
            origin={
                "hf": json.loads((folder / "config.json").read_text(encoding="utf-8")),
                "folder": str(folder.absolute()),
            },
            push=open_push(
                served.server,
                self.config.shared.run.name,
                token_file=served.token_file,
                ca_file=served.ca_file,
                clock=self.clock,
            ),
        )

    def _inputs(
        self, version: int, incarnation: Incarnation, heartbeat: Heartbeat
    ) -> Iterator[StepInput]:
        """The ledger's steps that the state lacks, then live ones."""
        entries = ledger.entries_after(self.store, version)
        if entries:
            heartbeat.beat("replaying", version=version, steps=len(entries))
        digest = self.config.settings_digest()
        feed = ShardFeed(
            self.store,
            self.config.shared.admission,
            self.wakeups,
            lambda version, why: heartbeat.beat("waiting", why, version=version),
        )
        live = LiveSteps(
            store=self.store,
            feed=feed,
            incarnation=incarnation,
            stopping=self.stopping,
            settings_digest=digest,
            clock=self.clock,
        )
        last = entries[-1].step if entries else version
        return itertools.chain(replayed_steps(entries, feed, digest), live.after(last))

    def _weights(self) -> StoredWeights:
        own = self.config.own.weights
        deltas = None
        if own.full_every > 1:
            deltas = DeltaPolicy(full_every=own.full_every, max_share=own.max_delta_share)
        name = self.config.shared.run.name
        return StoredWeights(self.store, name, clock=self.clock, deltas=deltas)

    def _leased(self) -> dict[int, str]:
        """Versions that other roles say they use, and which role."""
        beats = read_heartbeats(self.store)
        beats.pop(ROLE, None)
        return {b["version"]: role for role, b in beats.items() if b.get("version", -1) >= 0}


def announce(version: int) -> None:
    """Wake whoever waits for a version: worker, controller, launcher."""
    for role in ("worker", "controller", "launcher"):
        send_hint(role, version=version)
