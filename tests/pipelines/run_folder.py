"""A run folder with a configuration and weights, as the pipeline's commands find it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from infra.storage.local_store import LocalStore
from infra.weights.stored_weights import StoredWeights

CONFIG = """
[run]
name = "small"

[prompts]
source = "addition"
role = "text"
held_out = 0.2

[sampling]
n = 4
max_new_tokens = 4
stop = ["\\n"]

[recipe.settings.exact_answer]
extraction = ["first_line"]

[evaluation]
problems = 10
samples = 4
"""


def make_run(folder: Path, config: str = CONFIG, versions: int = 1) -> LocalStore:
    """Create the run; its versions hold one tensor each."""
    store = LocalStore(folder)
    store.create("run.toml", config.encode())
    weights = StoredWeights(store, "small")
    for version in range(versions):
        weights.publish(
            version,
            {"w": np.full(2, version, np.float32)},
            optimizer_step=version,
            model_config={},
            tokenizer_digest="t",
            incarnation="i",
        )
    return store
