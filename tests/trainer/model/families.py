"""Tiny models of every family as transformers wrote and computed them; see make_golden_families."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors.numpy

from trainer.model.config import ModelConfig
from trainer.model.pretrained import load_model
from trainer.model.transformer import Params

GOLDEN = Path(__file__).parents[2] / "golden" / "families"
NAMES = sorted(path.stem for path in GOLDEN.glob("*.npz"))


@dataclass(frozen=True, kw_only=True, eq=False)
class Golden:
    """One file, and the model that we read from it."""

    config: ModelConfig
    params: Params
    tokens: np.ndarray
    """int32[2,20]"""
    logits: np.ndarray
    """float32[2,20,V], as transformers computes them"""


def write_folder(name: str, folder: Path) -> Path:
    """The file ``name`` as a Hugging Face folder without a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    with np.load(GOLDEN / f"{name}.npz") as stored:
        (folder / "config.json").write_bytes(stored["config"].tobytes())
        arrays = {key: stored[key] for key in stored if key.endswith((".weight", ".bias"))}
    safetensors.numpy.save_file(arrays, folder / "model.safetensors")
    return folder


@functools.cache
def golden(name: str, scratch: Path) -> Golden:
    """Read one file through a folder in ``scratch``."""
    config, params = load_model(write_folder(name, scratch / name), 0)
    with np.load(GOLDEN / f"{name}.npz") as stored:
        return Golden(
            config=config, params=params, tokens=stored["tokens"], logits=stored["logits"]
        )
