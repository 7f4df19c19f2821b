"""``headrace train CONFIG --check``: judge the sections and say how big things will be."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from infra.contracts.errors import ConfigError
from trainer.config import SECTIONS, ModelSection, TrainerConfig
from trainer.model.config import ModelConfig, preset
from trainer.model.hf_config import from_hf

STATE_COPIES = 3
"""A checkpoint holds the parameters and AdamW's two moments."""


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """What the launcher wants to know before it starts anything."""

    parameters: int
    version_bytes: int
    """One published version."""
    checkpoint_bytes: int
    """One checkpoint, uncompressed."""
    sections: dict[str, Any]
    """The trainer's sections with every key, but of the objective only what is not its recipe's: a
    run that is continued or branched under another name takes that one's constants."""
    objective: str
    """What the objective is, with its constants."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    def to_text(self, where: str) -> str:
        return (
            f"{where}: the trainer's sections are fine; {self.parameters:,} parameters, "
            f"{self.version_bytes / 1e6:.1f} MB a version, "
            f"{self.checkpoint_bytes / 1e6:.1f} MB a checkpoint"
        )


def check(config: TrainerConfig, *, prepare: bool, environ: Mapping[str, str]) -> CheckReport:
    """Size up the model; with ``prepare`` also fetch it into the cache.

    Raises:
        ConfigError: the model's folder or file is missing or wrong.
    """
    section = config.own.model
    if prepare:
        from trainer.model.pretrained import cache_folder, resolve_model

        resolve_model(section, cache_folder(environ))
    parameters, matrices = count_parameters(_model_config(section))
    saved = {"float32": 0, "bfloat16": 2, "int8": 3}[config.own.training.publish_dtype]
    return CheckReport(
        parameters=parameters,
        version_bytes=4 * parameters - saved * matrices,
        checkpoint_bytes=4 * STATE_COPIES * parameters,
        sections={name: asdict(getattr(config.own, name)) for name in SECTIONS}
        | {"objective": config.own.objective.as_written()},
        objective=config.own.objective.describe(config.shared.admission.max_lag),
    )


def count_parameters(c: ModelConfig) -> tuple[int, int]:
    """(all parameters, those in matrices), by arithmetic: loading JAX for it takes a second."""
    inner, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    layer = c.dim * (2 * inner + 2 * kv) + 3 * c.dim * c.ffn
    vectors = (
        (4 if c.post_norms else 2) * c.dim
        + c.qkv_bias * (inner + 2 * kv)
        + c.qk_norm * 2 * c.head_dim
    )
    matrices = c.layers * layer + c.vocab * c.dim * (1 if c.tied else 2)
    return matrices + c.layers * vectors + c.dim, matrices


def _model_config(section: ModelSection) -> ModelConfig:
    if section.source != "folder":
        return preset(section.source)
    path = Path(section.path) / "config.json"
    try:
        return from_hf(json.loads(path.read_text(encoding="utf-8")), str(path))
    except FileNotFoundError:
        raise ConfigError(
            f"[model] path = {section.path}: no config.json there; give a local Hugging Face folder"
        ) from None
    except (OSError, ValueError, KeyError) as e:
        raise ConfigError(f"{path}: cannot be read: {e}") from e
