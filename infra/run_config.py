"""The sections of a run's configuration that both halves read, and the list of all sections.

``examples/demo.toml`` shows every section. ``pipelines/options.py`` and ``trainer/config.py`` parse
the rest, each its own; a section or key that nobody owns is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from infra.config import nearest, parse_section
from infra.contracts.errors import ConfigError
from infra.contracts.records import SamplingParams

T = TypeVar("T")

SHARED_SECTIONS = ("run", "prompts", "sampling", "admission", "stop", "endpoint")
PIPELINE_SECTIONS = ("pipeline", "recipe", "evaluation")
TRAINER_SECTIONS = (
    "model",
    "warm_start",
    "objective",
    "optimizer",
    "training",
    "weights",
    "checkpoint",
    "inference",
)
SECTIONS = SHARED_SECTIONS + PIPELINE_SECTIONS + TRAINER_SECTIONS


@dataclass(frozen=True, kw_only=True)
class RunSection:
    """[run]"""

    name: str
    """Names the run; part of every group id."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.name.strip():
            raise ValueError("name is empty; give the run a name")


@dataclass(frozen=True, kw_only=True)
class PromptsConfig:
    """[prompts]: one prompt set and how its held-out part is split off."""

    source: Literal["addition", "jsonl"] = "jsonl"
    path: str = ""
    """JSON lines file (source ``jsonl``); relative to the current folder."""
    question: str = "question"
    """Column with the prompt text, or with a list of {role, content} messages."""
    answer: str = "answer"
    """Column with the reference answer; rows without it are refused unless it is empty here."""
    answer_after: str = ""
    """Keep only what follows the last occurrence, e.g. ``#### `` for GSM8K."""
    template: str = "{question}"
    """How a text column becomes the model's text."""
    role: Literal["text", "user"] = "user"
    """``text``: the template is the whole input; ``user``: one chat turn under the template."""
    style: Literal["few_shot", "reversed"] = "few_shot"
    """Source ``addition``: two-digit plus one-digit few-shot, or padded sums, digits reversed."""
    held_out: float = 0.2
    """Share of prompts, by hash of the prompt id, kept for evaluation and denied at admission."""
    limit: int = 0
    """Use only the first so many rows (0: all)."""
    shuffle: bool = True
    epochs: int = 0
    """Stop after so many passes over the training prompts (0: go on until another stop)."""

    def __post_init__(self) -> None:
        if self.source == "jsonl" and not self.path:
            raise ValueError("path is missing; give the JSON lines file with the prompts")
        if not 0 <= self.held_out < 1:
            raise ValueError(f"held_out = {self.held_out}; must be in [0, 1)")
        if self.epochs < 0 or self.limit < 0:
            raise ValueError(f"epochs = {self.epochs}, limit = {self.limit}; at least 0")


@dataclass(frozen=True, kw_only=True)
class AdmissionConfig:
    """[admission]: how far rollouts may run ahead of the trainer (DESIGN section 5)."""

    groups_per_step: int = 12
    max_lag: int = 0
    """0 is on-policy; n lets rollouts be n versions old when they are trained on."""
    publish_every: int = 1
    on_stale: Literal["wait", "drop", "train"] = "wait"
    max_in_flight: int = 0
    """0: twice ``(max_lag + 1) * groups_per_step``."""
    lease_secs: float = 120.0
    max_attempts: int = 3
    max_refill: int = 10
    """Give up after this many times ``groups_per_step`` untrainable groups without a step."""

    def __post_init__(self) -> None:
        checks = (
            (self.groups_per_step >= 1, f"groups_per_step = {self.groups_per_step}; at least 1"),
            (self.max_lag >= 0, f"max_lag = {self.max_lag}; at least 0"),
            (self.publish_every >= 1, f"publish_every = {self.publish_every}; at least 1"),
            (
                self.max_lag >= self.publish_every - 1,
                f"max_lag = {self.max_lag} with publish_every = {self.publish_every} would "
                "deadlock; max_lag must be at least publish_every - 1",
            ),
            (self.max_in_flight >= 0, f"max_in_flight = {self.max_in_flight}; at least 0"),
            (self.lease_secs > 0, f"lease_secs = {self.lease_secs}; must be positive"),
            (self.max_attempts >= 1, f"max_attempts = {self.max_attempts}; at least 1"),
            (self.max_refill >= 1, f"max_refill = {self.max_refill}; at least 1"),
        )
        problems = [text for ok, text in checks if not ok]
        if problems:
            raise ValueError("; ".join(problems))

    @property
    def in_flight_limit(self) -> int:
        return self.max_in_flight or 2 * (self.max_lag + 1) * self.groups_per_step


@dataclass(frozen=True, kw_only=True)
class StopConfig:
    """[stop]: whichever comes first. Only this section may change when a run is resumed."""

    updates: int = 40
    """Trainer steps, counted from version 0."""
    wall_secs: float = 0.0
    """0: no limit."""
    target_pass_rate: float = 0.0
    """Mean training pass rate of the last five versions' groups; 0: no target."""
    no_progress_secs: float = 900.0
    """Stop with an error when no new version appears for so long."""

    def __post_init__(self) -> None:
        checks = (
            (self.updates >= 1, f"updates = {self.updates}; at least 1"),
            (self.wall_secs >= 0, f"wall_secs = {self.wall_secs}; at least 0 (0: no limit)"),
            (
                0 <= self.target_pass_rate <= 1,
                f"target_pass_rate = {self.target_pass_rate}; a share in [0, 1], not per cent",
            ),
            (
                self.no_progress_secs > 0,
                f"no_progress_secs = {self.no_progress_secs}; must be positive",
            ),
        )
        problems = [text for ok, text in checks if not ok]
        if problems:
            raise ValueError("; ".join(problems))


@dataclass(frozen=True, kw_only=True)
class EndpointConfig:
    """[endpoint]: where the inference worker listens."""

    host: str = "127.0.0.1"
    port: int = 0
    """0: the launcher picks a free one."""
    request_timeout_secs: float = 60.0
    retries: int = 4
    hedge_share: float = 0.0
    """Of several workers: at most this share of requests, the slowest, is sent to a second one too,
    and the first answer is taken. 0: none."""
    hedge_quantile: float = 0.95
    """A request is slow that takes longer than this share of the recent ones."""
    segment_tokens: int = 0
    """Ask for responses in segments of so many tokens: one that its worker gives up is continued
    by another, and weights may change between segments. 0: whole."""

    def __post_init__(self) -> None:
        checks = (
            (bool(self.host), "host is empty; give a name or address, e.g. 127.0.0.1"),
            (0 <= self.port < 65536, f"port = {self.port}; must be in [0, 65535]"),
            (
                self.request_timeout_secs > 0,
                f"request_timeout_secs = {self.request_timeout_secs}; must be positive",
            ),
            (self.retries >= 0, f"retries = {self.retries}; at least 0"),
            (0 <= self.hedge_share <= 1, f"hedge_share = {self.hedge_share}; in [0, 1]"),
            (0 < self.hedge_quantile < 1, f"hedge_quantile = {self.hedge_quantile}; in (0, 1)"),
            (self.segment_tokens >= 0, f"segment_tokens = {self.segment_tokens}; at least 0"),
        )
        problems = [text for ok, text in checks if not ok]
        if problems:
            raise ValueError("; ".join(problems))


@dataclass(frozen=True, kw_only=True)
class SharedConfig:
    """What both halves read."""

    run: RunSection
    prompts: PromptsConfig
    sampling: SamplingParams = field(default_factory=SamplingParams)
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    stop: StopConfig = field(default_factory=StopConfig)
    endpoint: EndpointConfig = field(default_factory=EndpointConfig)


def parse_shared(tree: Mapping[str, Any], where: str) -> SharedConfig:
    """Parse the shared sections and refuse unknown ones. Raises ``ConfigError``."""
    unknown = [name for name in tree if name not in SECTIONS]
    if unknown:
        raise ConfigError(
            f"{where}: unknown section [{unknown[0]}]; {nearest(unknown[0], SECTIONS)}"
        )
    return parse_sections(SharedConfig, tree, where, SHARED_SECTIONS)


def parse_sections(
    cls: type[T], tree: Mapping[str, Any], where: str, sections: tuple[str, ...]
) -> T:
    """Build a composition whose fields are section dataclasses, each from its own table."""
    import typing

    hints = typing.get_type_hints(cls)
    values, problems = {}, []
    for name in sections:
        table = tree.get(name, {})
        if not isinstance(table, Mapping):
            problems.append(f"{where}: '{name}' must be a table, [{name}]")
            continue
        try:
            values[name] = parse_section(hints[name], table, f"{where} [{name}]")
        except ConfigError as e:
            problems.append(str(e))
    if problems:
        raise ConfigError("\n".join(problems))
    return cls(**values)
