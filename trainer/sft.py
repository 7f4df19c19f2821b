"""``headrace sft CONFIG_OR_RUN --out DIR``: a short supervised warm start for the tiny model.

Fresh addition problems with their answers, cross-entropy on the answer (the policy step with every
advantage 1), until greedy accuracy reaches ``[warm_start] target``. The result is a Hugging Face
folder whose marker is written last; ``headrace train`` makes version 0 of it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from infra.contracts.errors import ConfigError, HeadraceError
from infra.run_tree import read_tree
from trainer.config import OptimizerConfig, TrainerConfig, parse_trainer

CHECK_STEP = 2**62
"""Supervised step number whose problems are the check; no training step gets there."""


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="headrace sft", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("config", help="a TOML file, or a run's folder")
    parser.add_argument("--out", required=True, help="folder for the model")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Warm-start and write the folder. Raises ``ConfigError`` for a task without a warm start."""
    args = parse_args(argv)
    tree, where = read_tree(args.config)
    config = parse_trainer(tree, where)
    prompts = config.shared.prompts
    if config.own.warm_start.target <= 0:
        raise ConfigError(f"{where} [warm_start]: target is not set; give the accuracy to reach")
    if (prompts.source, prompts.style) != ("addition", "reversed"):
        raise ConfigError(
            f"{where}: the warm start knows prompts.source = 'addition' with style = 'reversed' "
            f"only, not '{prompts.source}' with '{prompts.style}'; set warm_start.target = 0"
        )

    from trainer.model.pretrained import cache_folder, resolve_model

    cache = cache_folder(os.environ)
    warm_start(
        config,
        resolve_model(config.own.model, cache),
        Path(args.out),
        cache,
        lambda text: print(text, file=sys.stderr),
    )
    return 0


def warm_start(
    config: TrainerConfig, source: Path, out: Path, cache: Path, say: Callable[[str], None]
) -> float:
    """Train from ``source`` until the target and write ``out``; return the accuracy reached.

    Raises:
        HeadraceError: ``max_steps`` were not enough.
    """
    from infra.text.tokenizer import load_tokenizer
    from trainer.compile_cache import enable_compile_cache
    from trainer.model.pretrained import load_model
    from trainer.supervised import Supervised

    enable_compile_cache(cache)
    settings, seed = config.own.warm_start, config.shared.run.seed
    model, params = load_model(source, seed)
    optimizer = OptimizerConfig(lr=settings.lr, warmup_steps=settings.warmup_steps)
    supervised = Supervised(
        model,
        params,
        optimizer,
        load_tokenizer(source),
        seed=seed,
        held_out=config.shared.prompts.held_out,
    )
    accuracy = 0.0
    for step in range(1, settings.max_steps + 1):
        loss = supervised.learn(step, settings.batch)
        if step % settings.check_every == 0:
            accuracy = supervised.accuracy(CHECK_STEP, settings.check_problems)
            say(f"step {step}: loss {loss:.3f}, greedy accuracy {accuracy:.3f}")
            if accuracy >= settings.target:
                write_model_folder(source, out, supervised.named())
                return accuracy
    raise HeadraceError(
        f"the warm start reached {accuracy:.3f} of {settings.target} in {settings.max_steps} "
        "steps; raise warm_start.max_steps or lower warm_start.target"
    )


def write_model_folder(source: Path, out: Path, arrays: dict) -> None:
    """Copy configuration and tokenizer, write the weights, and the marker last."""
    import safetensors.numpy

    from infra.weights.export import TOKENIZER_FILES
    from trainer.model.pretrained import LAYOUT, MARKER

    out.mkdir(parents=True, exist_ok=True)
    (out / MARKER).unlink(missing_ok=True)
    for name in ("config.json", *TOKENIZER_FILES):
        if (source / name).is_file():
            shutil.copyfile(source / name, out / name)
    weights = out / "model.safetensors"
    safetensors.numpy.save_file(arrays, weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # save_file leaves 0600
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    (out / MARKER).write_text(json.dumps({"layout": LAYOUT, "sha256": {weights.name: digest}}))
