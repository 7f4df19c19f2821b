"""The trainer's sections of a run's configuration. Free of JAX, so that ``--check`` is fast."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from infra.contracts.errors import ConfigError
from infra.contracts.ids import content_id
from infra.run_config import SharedConfig, parse_sections, parse_shared
from trainer.inference_worker.config import InferenceConfig
from trainer.objective.config import ObjectiveConfig, check_objective, refuse

SECTIONS = (
    "model",
    "warm_start",
    "objective",
    "optimizer",
    "training",
    "weights",
    "checkpoint",
    "inference",
)


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """[model]: what version 0 is."""

    source: Literal["smollm2-135m", "tiny", "folder"] = "smollm2-135m"
    """``tiny`` is a character model from scratch; ``folder`` a Hugging Face folder."""
    path: str = ""
    """The folder (source ``folder``); relative to the current folder."""

    def __post_init__(self) -> None:
        refuse(
            ((self.source == "folder") == bool(self.path),
             f"path = {self.path!r} with source = '{self.source}'; "
             "give a path with source = 'folder' and only then"),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class WarmStartConfig:
    """[warm_start]: supervised steps before version 0, on fresh addition problems."""

    target: float = 0.0
    """Stop when greedy accuracy reaches it. 0: no warm start."""
    batch: int = 256
    lr: float = 2e-3
    warmup_steps: int = 50
    max_steps: int = 3000
    check_every: int = 10
    check_problems: int = 256

    def __post_init__(self) -> None:
        refuse(
            (0 <= self.target <= 1, f"target = {self.target}; must be in [0, 1]"),
            (self.batch >= 1, f"batch = {self.batch}; at least 1"),
            (self.lr > 0, f"lr = {self.lr}; must be positive"),
            (self.max_steps >= 1, f"max_steps = {self.max_steps}; at least 1"),
            (self.check_every >= 1, f"check_every = {self.check_every}; at least 1"),
            (self.check_problems >= 1, f"check_problems = {self.check_problems}; at least 1"),
        )


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """[optimizer]. The learning rate is a pure function of the step (the new version)."""

    name: Literal["adamw", "muon"] = "adamw"
    """``muon`` orthogonalises the updates of the layers' matrices; everything else stays AdamW."""
    lr: float = 2e-5
    """Of either: Muon's updates are scaled to the size that AdamW's usually have."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    warmup_steps: int = 5
    """Steps of linear rise; the first step already has lr / warmup_steps."""
    decay_steps: int = 0
    """Step at which cosine or line ends; required by them, so that no run length changes the lr."""
    final_lr: float = 0.05
    """Share of ``lr`` at and after ``decay_steps``."""
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    muon_beta: float = 0.95
    weight_decay: float = 0.0
    """On matrices only."""
    clip_norm: float = 1.0
    """Global gradient norm; 0: no clipping."""

    def __post_init__(self) -> None:
        refuse(
            (self.lr >= 0, f"lr = {self.lr}; must not be negative"),
            (self.warmup_steps >= 0, f"warmup_steps = {self.warmup_steps}; at least 0"),
            (self.schedule == "constant" or self.decay_steps > self.warmup_steps,
             f"decay_steps = {self.decay_steps} with schedule = '{self.schedule}'; "
             f"must be greater than warmup_steps = {self.warmup_steps}"),
            (0 <= self.final_lr <= 1, f"final_lr = {self.final_lr}; must be in [0, 1]"),
            (0 <= self.b1 < 1 and 0 <= self.b2 < 1, "b1 and b2 must be in [0, 1)"),
            (0 <= self.muon_beta < 1, f"muon_beta = {self.muon_beta}; must be in [0, 1)"),
            (self.weight_decay >= 0, f"weight_decay = {self.weight_decay}; must not be negative"),
            (self.clip_norm >= 0, f"clip_norm = {self.clip_norm}; must not be negative"),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """[training]: how a step is cut up. Nothing here changes the loss, except ``minibatches``."""

    minibatches: int = 1
    """Optimizer calls per step (version); the step's groups are split evenly, in order."""
    row_tokens: int = 0
    """Length of a packed row; 0: the power of two with the least work for the step's shape."""
    micro_batch_tokens: int = 2048
    """Tokens that go through the model at once; a row that is longer goes alone."""
    head_tokens: int = 1024
    """Predicted tokens whose logits exist at once (recomputed in the backward pass beyond)."""
    remat: bool = False
    """Recompute activations layer by layer: less memory, a third more work."""
    publish_dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    """See ``infra.weights.cast``."""

    def __post_init__(self) -> None:
        refuse(
            (self.minibatches >= 1, f"minibatches = {self.minibatches}; at least 1"),
            (self.row_tokens >= 0, f"row_tokens = {self.row_tokens}; at least 0"),
            (self.micro_batch_tokens >= 1, "micro_batch_tokens must be at least 1"),
            (self.head_tokens >= 1, f"head_tokens = {self.head_tokens}; at least 1"),
        )


@dataclass(frozen=True, kw_only=True)
class WeightsConfig:
    """[weights]: how versions are published. Changes no step, so a run may change it."""

    full_every: int = 1
    """A full version at least every so many versions, between them only what changed (worth it with
    ``training.publish_dtype = "bfloat16"``). 1: every version is full."""
    max_delta_share: float = 0.5
    """A delta larger than this share of the full version is published full instead."""
    server: str = ""
    """``grpc://host:port`` (or ``grpc+tls://``) of a ``headrace weights serve``: the trainer puts
    versions there, workers ask it before the store. Empty: the store alone, the fastest on one
    machine."""
    token_file: str = ""
    """Holds the server's token; empty: ``HEADRACE_WEIGHTS_TOKEN``."""
    ca_file: str = ""
    """PEM, whom to trust with TLS; empty: the system's authorities."""

    def __post_init__(self) -> None:
        refuse(
            (self.full_every >= 1, f"full_every = {self.full_every}; at least 1"),
            (0 < self.max_delta_share <= 1,
             f"max_delta_share = {self.max_delta_share}; must be above 0, at most 1"),
            (not self.server or self.server.startswith(("grpc://", "grpc+tls://")),
             f"server = {self.server!r}; give grpc://host:port or grpc+tls://host:port"),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """[checkpoint]: whichever of the two comes first; and what is kept."""

    every_steps: int = 5
    """Also bounds the disk: versions since the last checkpoint are kept for a replay."""
    every_secs: float = 120.0
    keep_checkpoints: int = 2
    keep_versions: int = 4

    def __post_init__(self) -> None:
        refuse(
            (self.every_steps >= 1, f"every_steps = {self.every_steps}; at least 1"),
            (self.every_secs > 0, f"every_secs = {self.every_secs}; must be positive"),
            (self.keep_checkpoints >= 1, f"keep_checkpoints = {self.keep_checkpoints}; at least 1"),
            (self.keep_versions >= 2, f"keep_versions = {self.keep_versions}; at least 2"),
        )


@dataclass(frozen=True, kw_only=True)
class TrainerSections:
    """The trainer's own sections together."""

    model: ModelSection = field(default_factory=ModelSection)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    inference: InferenceConfig = field(default_factory=InferenceConfig)


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """Everything the trainer reads of ``run.toml``."""

    shared: SharedConfig
    own: TrainerSections

    @property
    def fixed_length(self) -> int:
        """Tokens per sequence that aggregation ``fixed`` divides by."""
        return self.own.objective.fixed_length or self.shared.sampling.max_new_tokens

    def settings_digest(self) -> str:
        """Names what a replayed step depends on besides its groups; part of every ledger entry."""
        parts = (self.own.objective, self.own.optimizer, self.own.training)
        values = [f"{k}={v!r}" for part in parts for k, v in sorted(asdict(part).items())]
        lag = self.shared.admission.max_lag
        return content_id("settings", *values, f"max_lag={lag}", f"length={self.fixed_length}")


def parse_trainer(tree: Mapping[str, Any], where: str) -> TrainerConfig:
    """Parse and cross-check. Raises ``ConfigError`` with every problem found."""
    shared = parse_shared(tree, where)
    own = parse_sections(TrainerSections, tree, where, SECTIONS)
    check_objective(own.objective, shared.sampling.n, shared.admission.max_lag)
    if own.training.minibatches > shared.admission.groups_per_step:
        raise ConfigError(
            f"{where} [training]: minibatches = {own.training.minibatches} with "
            f"admission.groups_per_step = {shared.admission.groups_per_step}; at most one per group"
        )
    if own.warm_start.target and own.model.source != "tiny":
        raise ConfigError(
            f"{where} [warm_start]: target is for model.source = 'tiny', not "
            f"'{own.model.source}'; set target = 0"
        )
    return TrainerConfig(shared=shared, own=own)
