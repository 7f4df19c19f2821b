"""The pipeline half's sections of a run's configuration: [pipeline], [recipe], [evaluation]."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from curation.recipe import RecipeConfig, build_recipe, check_against_sampling
from infra.run_config import (
    PIPELINE_SECTIONS,
    SharedConfig,
    parse_sections,
    parse_shared,
)
from infra.run_tree import read_run_tree
from infra.storage.object_store import ObjectStore

LOCAL_RUNNER = "BundleBasedDirectRunner"
BOUNDED_RUNNER = "FnApiRunner"


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """[pipeline]: the streaming pipeline's processes."""

    processes: int = 2
    """Processes on this machine. Each runs one bundle at a time, so while one scores and writes,
    another keeps the worker busy."""
    flush_groups: int = 64
    """Most groups in one shard."""
    batch_groups: int = 0
    """0: commit at the end of each bundle (one machine). Above: gather so many groups across
    workers first (distributed runners)."""
    max_wait_secs: float = 1.0
    """Longest a group waits to be batched; only with ``batch_groups``."""
    client_threads: int = 32
    """Requests one process has under way."""
    runner: str = LOCAL_RUNNER
    """Any Beam runner that streams, by its own name."""
    subscription: str = ""
    """Where tasks come from; empty: the controller's embedded broker."""

    def __post_init__(self) -> None:
        counts = {
            "processes": self.processes,
            "flush_groups": self.flush_groups,
            "client_threads": self.client_threads,
        }
        problems = [f"{name} = {value}; at least 1" for name, value in counts.items() if value < 1]
        if self.batch_groups < 0 or self.max_wait_secs <= 0:
            problems.append("batch_groups must be >= 0 and max_wait_secs positive")
        problems += refuse_runner(self.runner)
        if problems:
            raise ValueError("; ".join(problems))


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """[evaluation]: pass rates on held-out prompts, before and after."""

    problems: int = 96
    """Held-out prompts to use; all there are, if fewer."""
    samples: int = 4
    """Sampled responses of each (under [sampling]); 0: greedy only."""
    timeout_secs: float = 600.0
    """For all responses together."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.problems < 1 or self.samples < 0 or self.timeout_secs <= 0:
            raise ValueError("problems must be >= 1, samples >= 0 and timeout_secs positive")


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """The sections that the pipeline half reads."""

    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    recipe: RecipeConfig = field(default_factory=RecipeConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)


def refuse_runner(name: str) -> list[str]:
    """``DirectRunner`` is whichever runner Beam finds that day, perhaps a downloaded one."""
    if name in ("", "DirectRunner", "SwitchingDirectRunner"):
        return [f"runner = '{name}' is not one runner; name it, e.g. {LOCAL_RUNNER}"]
    return []


def parse_options(tree: Mapping[str, Any], where: str) -> PipelineOptions:
    """Parse and check the sections; also loads the user's scorers once, to see that they work.

    Raises:
        ConfigError: every problem of the sections, or a recipe under which no group could train.
    """
    options = parse_sections(PipelineOptions, tree, where, PIPELINE_SECTIONS)
    build_recipe(options.recipe).close()
    check_against_sampling(options.recipe, parse_shared(tree, where).sampling)
    return options


def read_run_config(store: ObjectStore) -> tuple[SharedConfig, PipelineOptions]:
    """Read ``run.toml`` of a run. Raises ``ConfigError`` if there is none or it is wrong."""
    tree, where = read_run_tree(store)
    return parse_shared(tree, where), parse_options(tree, where)
